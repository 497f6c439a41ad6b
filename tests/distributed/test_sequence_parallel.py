"""States that are split by positions between split layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from backends.blocks import CompileOptions, checkpoint_activations
from backends.errors import BackendError
from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.core import MixedPrecision
from modelzoo_trainer.zoo.models.gpt2 import Gpt2
from tests.distributed.engines import spread
from tests.distributed.ranks import run_ranks
from tests.distributed.test_collectives import Messages
from tests.distributed.test_tensor_parallel import SPLIT, TOKENS, learn, make_decoder
from tests.zoo.models.decoder_cases import CASES, NO_DROPOUT, SIZES

SEQUENCE = SPLIT | {"sequence_parallel": True}
DROPOUT = {"dropout_rate": 0.3, "embedding_dropout_rate": 0.1, "attention_dropout_rate": 0.2}
EXPERTS: dict[str, Any] = {
    "moe": {"num_experts": 3, "top_k": 2, "load_balancing_loss_coef": 0.1},
}


def note_width(model: nn.Module, seen: list[int]) -> None:
    """Note how many positions each norm and dropout outside attention computes on."""

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            seen.append(inputs[0].shape[1])

    for layer in model.layers:
        layer.ffn_norm.register_forward_pre_hook(note)
        layer.dropout.register_forward_pre_hook(note)


def learn_spread(
    rank: int, case: str, options: dict[str, Any], changes: dict[str, Any], mode: Any = None
) -> dict[str, Any]:
    kind, own = CASES[case]
    model = make_decoder(kind, own | changes)
    if mode is not None:
        checkpoint_activations(model, mode)
    spread(model, options)
    seen: list[int] = []
    if case == "gpt2":
        note_width(model, seen)
    torch.manual_seed(5)
    found = learn(model)
    num = 2 if "sequence_parallel" in options else 1
    assert set(seen) in (set(), {12 // num})
    return found


# CI: each layer, experts, grouped heads; norms of heads are inside attention.
@pytest.mark.soak_cases("qk norm*", "softcap, alibi", "falcon")
@pytest.mark.slow_cases("[!g]*", "gptj", "gemma2")
@pytest.mark.parametrize("case", CASES)
def test_a_decoder_of_two_processes_equals_one(case: str) -> None:
    kind, changes = CASES[case]
    expected = learn(make_decoder(kind, changes | NO_DROPOUT))

    found = run_ranks(2, learn_spread, case, SEQUENCE, NO_DROPOUT)

    torch.testing.assert_close(found, [expected] * 2, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_with_sharding_the_weights_are_those_of_one_process() -> None:
    expected = learn(make_decoder(Gpt2, NO_DROPOUT))
    both = {"parallel": {"tensor": 2, "shard": 2}, "sequence_parallel": True}

    found = run_ranks(4, learn_spread, "gpt2", both, NO_DROPOUT)

    torch.testing.assert_close(found, [expected] * 4, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt2", "experts, sandwich"])
def test_dropout_is_that_of_whole_states_also_recomputed(case: str) -> None:
    whole = run_ranks(2, learn_spread, case, SPLIT, DROPOUT)

    assert whole[0]["losses"] != run_ranks(2, learn_spread, case, SPLIT, NO_DROPOUT)[0]["losses"]
    for mode in (None, "full", "selective"):
        found = run_ranks(2, learn_spread, case, SEQUENCE, DROPOUT, mode)
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)


def learn_compiled(rank: int) -> dict[str, Any]:
    model = make_decoder(Gpt2, NO_DROPOUT)
    options = CompileOptions(target="blocks", backend="aot_eager", fullgraph=True)
    module, _ = spread(model, SEQUENCE, options)
    return learn(module)


@pytest.mark.slow
def test_blocks_are_compiled_as_whole_graphs() -> None:
    expected = learn(make_decoder(Gpt2, NO_DROPOUT))

    found = run_ranks(2, learn_compiled)

    torch.testing.assert_close(found, [expected] * 2, rtol=1e-9, atol=1e-9)


def exchanged(rank: int, options: dict[str, Any]) -> tuple[list[str], list[str]]:
    model = make_decoder(Gpt2, NO_DROPOUT)
    spread(model, options)
    messages = Messages()
    with messages:
        model({"input_ids": TOKENS, "labels": TOKENS})["loss"].backward()
        trained = messages.take()
        with torch.no_grad():
            model({"input_ids": TOKENS[:, :5], "labels": TOKENS[:, :5]})
    return [name for name, _ in trained], [name for name, _ in messages.take()]


@pytest.mark.slow
def test_one_gather_serves_queries_keys_and_values() -> None:
    whole, _ = run_ranks(2, exchanged, SPLIT)[0]
    for trained, evaluated in run_ranks(2, exchanged, SEQUENCE):
        # Forward: for both parts of two layers, and the head. Backward: from both parts, before the
        # first layer, and once more for the gradients of the weights of each part.
        gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
        assert trained.count(gather) - whole.count(gather) == (4 + 1) + (4 + 1 + 4)
        assert trained.count(scatter) - whole.count(scatter) == 4 + 4
        # Any number of positions: as without the option.
        assert scatter not in evaluated


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = (torch.arange(12) * 7 + index * 5) % 51
        return {"input_ids": row, "labels": row.roll(-1)}


def make_policy() -> Gpt2:
    torch.manual_seed(3)
    return Gpt2(**SIZES, **EXPERTS, **DROPOUT).double()


def fit(rank: int, folder: Path, max_steps: int) -> dict[str, Any]:
    trainer = Trainer(
        device="cpu",
        backend={"parallel": {"tensor": 2, "shard": 2}, "sequence_parallel": True},
        model_dir=folder,
        model=make_policy,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        precision=MixedPrecision(enabled=False, max_gradient_norm=0.5),
        loop=TrainingLoop(max_steps=max_steps, eval_frequency=None),
        checkpoint=Checkpoint(steps=3),
        seed=1,
    )
    trainer.fit(DataLoader(Rows(), batch_size=2))
    found = trainer.backend.host_state(dict(trainer.model.named_parameters()))
    return {name: value.numpy() for name, value in found.items()}


@pytest.mark.slow
def test_a_run_with_dropout_and_experts_resumes_exactly(tmp_path: Path) -> None:
    whole = run_ranks(4, fit, tmp_path / "whole", 6)[0]
    run_ranks(4, fit, tmp_path / "cut", 3)

    resumed = run_ranks(4, fit, tmp_path / "cut", 6)[0]

    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


class Unknown(Gpt2):
    sequence_plan: ClassVar[dict[str, str]] = {"layers": "splits"}


class Nested(Gpt2):
    sequence_plan: ClassVar[dict[str, str]] = {
        "layers": "split",
        "layers.*.ffn": "gather",
        "layers.*.dropout": "own_positions",
    }


class Forgetful(Gpt2):
    sequence_plan: ClassVar[dict[str, str]] = {"layers": "split", "layers.*.ffn": "gather"}


def refusals(rank: int) -> list[str]:
    dist.init_process_group("gloo")
    messages = []
    plan = {"layers.*.ffn.up_proj": "colwise", "layers.*.ffn.down_proj": "rowwise"}
    for model, options in (
        (nn.Linear(2, 2), {"tensor_plan": {"": "colwise"}}),
        (make_decoder(Unknown, {}), {}),
        (make_decoder(Nested, EXPERTS), {}),
        (make_decoder(Forgetful, {}), {}),
        (make_decoder(Gpt2, {}), {"tensor_plan": plan | {"layers.*.attention.q_proj": "colwise"}}),
    ):
        with pytest.raises(BackendError) as caught:
            spread(model, SEQUENCE | options)
        messages.append(str(caught.value))
    model = make_decoder(Gpt2, {})
    spread(model, SEQUENCE)
    with pytest.raises(BackendError) as caught:
        model({"input_ids": TOKENS[:, :5], "labels": TOKENS[:, :5]})
    messages.append(str(caught.value))
    return messages


@pytest.mark.slow
def test_what_cannot_be_split_by_positions_is_refused() -> None:
    facts = [
        ("backend.parallel.tensor 2", "Linear", "'sequence_plan'"),
        ("Unknown.sequence_plan['layers'] is 'splits'", "Did you mean 'split'?"),
        ("Nested", "layers.0.ffn (gather)", "layers.0.ffn.experts.dropout", "own_positions"),
        ("layers.*.attention_norm has parameters",),
        ("layers.*.attention.k_proj has parameters",),
        ("over 2 processes", "has 5 positions", "a multiple of 2"),
    ]
    messages = run_ranks(2, refusals)[0]
    for message, expected in zip(messages, facts, strict=True):
        assert [fact for fact in expected if fact not in message] == []
