"""Decoders whose rows are split over processes: losses and gradients are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from backends.parallel.context import ContextParallel
from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import ModelEvalMetrics
from modelzoo_trainer.core import MixedPrecision
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.callbacks.compute_norm_gns import ComputeNormGNS
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.decoder_names import Gpt2, GptJ
from tests.distributed.ranks import run_ranks, try_ranks
from tests.distributed.training import Metrics
from tests.zoo.models.llama_settings import LLAMA

LENGTH, BATCH, NUM_STEPS, VOCAB = 16, 4, 20, 51
CLOSE = 1e-5
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "max_position_embeddings": LENGTH,
    "num_hidden_layers": 2,
    "dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
    "embedding_dropout_rate": 0.0,
    "num_heads": 4,
    "filter_size": 32,
}
ROTARY = LLAMA | {"rotary_dim": 4}
WINDOW = {"attention_sliding_window_length": 5}
EVERY_OTHER = WINDOW | {"sliding_window_every_other_decoder_layer": True}
GROUPED = {
    "attention_module": "multiquery_attention",
    "extra_attention_params": {"num_kv_groups": 2},
}
EXPERTS = {"num_experts": 3, "top_k": 2, "load_balancing_loss_coef": 0.1}
DECODERS: dict[str, tuple[type[Decoder], dict[str, Any]]] = {
    "llama, packed": (Gpt2, ROTARY | GROUPED),
    "window, soft caps": (
        Gpt2,
        ROTARY | EVERY_OTHER | {"attention_logit_softcapping": 5.0, "final_logit_softcapping": 9.0},
    ),
    "gptj, window, sinks": (GptJ, WINDOW | {"attention_sink_tokens": 2, "rotary_dim": 4}),
    "learned, masked": (Gpt2, {"position_embedding_offset": 2}),
    "alibi": (Gpt2, {"position_embedding_type": "alibi", "alibi_trainable_slopes": True}),
    "relative": (Gpt2, {"position_embedding_type": "relative", "loss_scaling": "batch_size"}),
    "experts": (Gpt2, {"moe": EXPERTS | {"load_balancing_loss_over": "batch"}}),
    "experts, masked": (Gpt2, {"moe": EXPERTS}),
    "experts by position": (
        Gpt2,
        {"moe": {"num_experts": 3, "top_k": 2, "routing_algorithm": "uniform"}},
    ),
}


def make(name: str) -> Decoder:
    kind, changes = DECODERS[name]
    torch.manual_seed(3)
    return kind(**SMALL | changes)


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of tokens; packed ones have documents of 3, 6 and 7 tokens in some order."""

    def __init__(self, name: str, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(1)
        num = BATCH * 5
        ids = torch.randint(VOCAB, (num, length), generator=generator)
        self.features = {"input_ids": ids, "labels": ids.roll(-1, 1)}
        if "masked" in name or "packed" in name:
            mask = torch.randint(0, 2, (num, length), generator=generator)
            mask[1] = 0
            self.features["attention_mask"] = mask
        if "packed" in name:
            sizes = [(3, 6, 7), (7, 3, 6), (6, 7, 3), (16,)]
            spans = [
                [end for size in sizes[i % 4] for end in reversed(range(size))] for i in range(num)
            ]
            places = [[one for size in sizes[i % 4] for one in range(size)] for i in range(num)]
            self.features |= {
                "attention_span": torch.tensor(spans),
                "position_ids": torch.tensor(places),
            }

    def __len__(self) -> int:
        return len(self.features["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: one[index] for key, one in self.features.items()}


class Seen(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rows: list[Any] = []
        self.shapes: set[tuple[int, ...]] = set()

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        self.rows.append(batch["input_ids"].tolist())
        if "logits" in outputs:
            self.shapes.add(tuple(outputs["logits"].shape))

    def on_after_optimizer_step(self, trainer, model, optimizer):
        self.norms.append(trainer.backend.norms.grad_norm(list(model.parameters())).item())


def fit(rank: int, folder: Path, name: str, batch_size: int, options: dict[str, Any]) -> Any:
    """Train with a validation at the end, and return what this process saw of it."""
    seen, metrics = Seen(), Metrics()
    rows = Rows(name, options.get("length", LENGTH))
    trainer = Trainer(
        device="cpu",
        backend=options.get("backend"),
        model_dir=folder,
        model=lambda: make(name),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        precision=MixedPrecision(enabled=False, max_gradient_norm=1.0),
        loop=TrainingLoop(
            max_steps=options.get("steps", NUM_STEPS),
            grad_accum_steps=options.get("accumulate", 1),
            eval_frequency=options.get("steps", NUM_STEPS),
        ),
        checkpoint=Checkpoint(steps=options.get("save")),
        callbacks=[seen, ModelEvalMetrics()],
        loggers=[metrics],
        seed=1,
    )
    trainer.fit(DataLoader(rows, batch_size=batch_size, shuffle=True), DataLoader(rows, batch_size))
    return {
        "losses": seen.losses,
        "norms": seen.norms,
        "rows": seen.rows,
        "validation": {
            key: value
            for _, row in metrics.rows
            for key, value in row.items()
            if key.startswith("val")
        },
    }


def compare(found: dict[str, Any], alone: dict[str, Any]) -> None:
    assert found["rows"] == alone["rows"]
    torch.testing.assert_close(found["losses"], alone["losses"], rtol=0, atol=CLOSE)
    torch.testing.assert_close(found["norms"], alone["norms"], rtol=CLOSE, atol=0)


CASES = {f"{name}, {num}": (name, num) for name in DECODERS for num in (2, 4)}


@pytest.mark.slow_cases("*", "!llama, packed, 2")
@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_validation_are_those_of_one_process(
    tmp_path: Path, case: str
) -> None:
    name, num = CASES[case]
    alone = fit(0, tmp_path / "alone", name, BATCH, {})
    options = {"backend": {"parallel": {"context": -1}}}
    found = run_ranks(num, fit, tmp_path / "together", name, BATCH, options)
    for one in found:
        compare(one, alone)
    assert alone["validation"]
    torch.testing.assert_close(found[0]["validation"], alone["validation"], rtol=CLOSE, atol=CLOSE)


ENGINES: dict[str, tuple[str, int, dict[str, Any], int, int]] = {
    # decoder, processes, options of the backend, processes with different data, accumulation
    "FSDP2": ("llama, packed", 4, {"parallel": {"shard": 2, "context": 2}}, 2, 1),
    "DDP": ("window, soft caps", 4, {"parallel": {"context": 2}}, 2, 2),
    "TP": ("llama, packed", 4, {"parallel": {"tensor": 2, "context": 2}}, 1, 1),
    "TP, positions": (
        "window, soft caps",
        4,
        {"parallel": {"tensor": 2, "context": 2}, "sequence_parallel": True},
        1,
        1,
    ),
    "recomputed": ("gptj, window, sinks", 2, {"activation_checkpointing": "full"}, 1, 2),
    "selective": ("experts, masked", 2, {"activation_checkpointing": "selective"}, 1, 1),
    "compiled": (
        "window, soft caps",
        2,
        {"compile": {"target": "blocks", "backend": "aot_eager", "fullgraph": True}},
        1,
        1,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_computes_what_one_process_does(tmp_path: Path, engine: str) -> None:
    name, num, backend, shards, accumulate = ENGINES[engine]
    alone = fit(0, tmp_path / "alone", name, BATCH, {"accumulate": accumulate})
    options = {
        "backend": {"parallel": {"context": 2}} | backend,
        "accumulate": accumulate,
    }
    found = run_ranks(num, fit, tmp_path / "together", name, BATCH // shards, options)
    sharing = num // shards
    for rank, one in enumerate(found):
        assert one["rows"] == found[rank // sharing * sharing]["rows"]
        torch.testing.assert_close(one["norms"], alone["norms"], rtol=CLOSE, atol=0)
        if shards == 1:
            compare(one, alone)
    torch.testing.assert_close(found[0]["validation"], alone["validation"], rtol=CLOSE, atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("shard", [1, 2])
def test_a_run_resumes_with_fewer_processes_along_context(tmp_path: Path, shard: int) -> None:
    name = "llama, packed"
    alone = fit(0, tmp_path / "alone", name, BATCH, {"steps": 6})
    folder, losses, seen = tmp_path / "together", [], []
    for num in (4, 2, 1):
        axes = {"context": num // shard, "shard": shard} if num >= shard else {}
        options = {"steps": 2 + len(losses), "save": 2, "backend": {"parallel": axes}}
        if num > 1:
            batch_size = BATCH // shard
            found = run_ranks(num, fit, folder, name, batch_size, options)
            losses += [
                sum(one) / shard
                for one in zip(*(rank["losses"] for rank in found[:: num // shard]), strict=True)
            ]
            of_shards = [rank["rows"] for rank in found[:: num // shard]]
            seen += [
                [row for part in step for row in part] for step in zip(*of_shards, strict=True)
            ]
        else:
            last = fit(0, folder, name, BATCH, options)
            losses, seen = losses + last["losses"], seen + last["rows"]
    assert [sorted(step) for step in seen] == [sorted(step) for step in alone["rows"]]
    if shard == 1:
        torch.testing.assert_close(losses, alone["losses"], rtol=0, atol=CLOSE)
    torch.testing.assert_close(losses[-2:], alone["losses"][-2:], rtol=0, atol=CLOSE)


@pytest.mark.slow
def test_rows_that_cannot_be_split_end_the_run_before_the_first_step(tmp_path: Path) -> None:
    options = {"backend": {"parallel": {"context": 2}}, "length": LENGTH - 2}
    for is_ok, found in try_ranks(2, fit, tmp_path, "alibi", BATCH, options, stay=False):
        assert not is_ok
        assert "backend.parallel.context is 2, but a row has 14 positions" in found
        assert "a multiple of 4" in found


def refusing(rank: int, folder: Path) -> str:
    with pytest.raises(ConfigError) as found:
        Trainer(
            device="cpu",
            backend={"parallel": {"context": 2}},
            model_dir=folder,
            model=lambda: Gpt2(**SMALL),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            callbacks=[ComputeNormGNS("Linear")],
        )
    return str(found.value)


@pytest.mark.slow
def test_norms_of_examples_are_refused(tmp_path: Path) -> None:
    for said in run_ranks(2, refusing, tmp_path):
        assert "backend.parallel.context" in said


def test_experts_that_are_balanced_over_rows_are_refused() -> None:
    moe = {"num_experts": 3, "top_k": 2, "router_selection_nonlinearity": "sinkhorn"}
    model = Gpt2(**SMALL | {"moe": moe})
    with pytest.raises(ConfigError, match=r"backend\.parallel\.context is 2, .* sinkhorn"):
        model.split_rows(ContextParallel(0, 2, ""))


def requested_logits(rank: int) -> dict[str, Any]:
    """Return the logits of whole rows, and gradients of a loss that is computed from these."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    model = make("alibi")
    model.requested_outputs = ("logits",)
    model.split_rows(ContextParallel(rank, size, dist.group.WORLD.group_name))
    return with_logits(model, size)


def with_logits(model: Decoder, size: int) -> dict[str, Any]:
    batch = {key: one[:BATCH] for key, one in Rows("alibi").features.items()}
    outputs = model(batch)
    (outputs["loss"] + outputs["logits"].square().mean()).backward()
    grads = {}
    for name, param in model.named_parameters():
        if size > 1:
            dist.all_reduce(param.grad)
            param.grad /= size
        grads[name] = param.grad.numpy()
    model.requested_outputs = ()
    return {
        "logits": outputs["logits"].detach().numpy(),
        "grads": grads,
        "keys": sorted(model(batch)),
    }


@pytest.mark.slow
def test_requested_logits_are_those_of_whole_rows() -> None:
    model = make("alibi")
    model.requested_outputs = ("logits",)
    expected = with_logits(model, 1)
    keys = expected.pop("keys")
    assert "logits" not in keys
    for found in run_ranks(2, requested_logits):
        assert found.pop("keys") == keys
        torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)
