"""Models of `transformers` built on `meta` and sharded over processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import Lora, ModelEma
from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from modelzoo_trainer.zoo.models.hugging_face.model import HfModel
from tests.distributed.ranks import run_ranks
from tests.zoo.hugging_face.hf_cases import config_of as plain_config_of
from tests.zoo.hugging_face.hf_cases import language_batch

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.slow

SHARD: dict[str, Any] = {"parallel": {"shard": -1}}
PEFT = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)


def config_of(model_type: str) -> dict[str, Any]:
    """Return the settings of a small model without dropout."""
    return plain_config_of(model_type) | (DROPOUT if model_type == "gpt2" else {})


def rows() -> list[dict[str, torch.Tensor]]:
    batch = language_batch(num_rows=8)
    return [{key: value[idx] for key, value in batch.items()} for idx in range(8)]


def fit(rank: int, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Train for two steps of four rows; return the initial and final weights and the losses."""
    options = dict(options)
    backend, kind = options.pop("backend", None), options.pop("kind", HfCausalLm)
    callbacks = [make() for make in options.pop("callbacks", ())]
    num_bytes, real = [0], disk.read_at

    def counting(fd: int, views: list[memoryview], position: int) -> int:
        num_bytes[0] += sum(map(len, views))
        return real(fd, views, position)

    disk.read_at = counting
    torch.manual_seed(rank)
    trainer = Trainer(
        device="cpu",
        backend=backend,
        model_dir=folder,
        model=lambda: kind(**options),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(num_steps=2),
        checkpoint=Checkpoint(steps=1),
        callbacks=callbacks,
        seed=1,
    )
    model: Any = trainer.model
    start = {name: value.clone() for name, value in host(trainer).items()}
    buffers = {name: one.tolist() for name, one in model.named_buffers()}
    world = trainer.backend.comm.world_size
    trainer.fit(DataLoader(rows(), batch_size=4 // world))  # type: ignore[arg-type]  # a list
    head = model.model.get_output_embeddings()
    return {
        "read": num_bytes[0],
        "start": start,
        "buffers": buffers,
        "end": host(trainer),
        "is_tied": head is not None and head.weight is model.model.get_input_embeddings().weight,
    }


def host(trainer: Trainer) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = trainer.backend.host_state(dict(trainer.model.state_dict()))
    return found


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], atol: float = 0) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], atol=atol, rtol=0, msg=name)


@pytest.mark.parametrize("model_type", ["gpt2"])
def test_initial_values_do_not_depend_on_the_number_of_processes(
    model_type: str, tmp_path: Path
) -> None:
    options = {"config": config_of(model_type), "init_device": "meta"}
    alone = fit(0, tmp_path / "1", options)
    found = run_ranks(2, fit, tmp_path / "2", options | {"backend": SHARD})
    for one in found:
        same(one["start"], alone["start"])
        assert one["buffers"] == alone["buffers"]
        assert one["is_tied"] == alone["is_tied"] == (model_type == "gpt2")
        same(one["end"], alone["end"], atol=1e-5)
    built = HfCausalLm(config=config_of(model_type))
    assert {name: one.tolist() for name, one in built.named_buffers()} == alone["buffers"]
    for name, value in built.state_dict().items():  # of the same distribution
        std = alone["start"][name].std() if value.numel() > 1 else 0
        assert abs(value.std() - std) < 0.005 if value.numel() > 1 else True, name


@pytest.mark.parametrize("model_type", ["llama"])
def test_weights_of_a_folder_are_read_by_their_rows(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = HfCausalLm(config=config_of(model_type))
    theirs.save_pretrained(tmp_path / "folder")
    options = {
        "pretrained_model_name_or_path": str(tmp_path / "folder"),
        "init_device": "meta",
        "backend": SHARD,
    }

    found = run_ranks(2, fit, tmp_path / "run", options)

    size = sum(one.nbytes for one in theirs.parameters())
    for one in found:
        same(one["start"], theirs.state_dict())
        if model_type == "llama":
            assert one["read"] < 0.6 * size
    alone = fit(0, tmp_path / "1", {key: options[key] for key in list(options)[:1]})
    same(found[0]["end"], alone["end"], atol=1e-5)


def lora() -> Lora:
    return Lora({"r": 4, "target_modules": ["q_proj"]})


def ema() -> ModelEma:
    return ModelEma(0.5, validate=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_config": PEFT},
        {"callbacks": [lora, ema], "backend": SHARD | {"activation_checkpointing": "full"}},
    ],
    ids=["peft", "callbacks"],
)
def test_training_is_that_of_one_process(changes: dict[str, Any], tmp_path: Path) -> None:
    options = {"config": config_of("llama"), "init_device": "meta", "backend": SHARD} | changes
    found = run_ranks(2, fit, tmp_path / "2", options)
    alone = fit(0, tmp_path / "1", options | {"backend": None})
    for one in found:
        same(one["start"], alone["start"])
        same(one["end"], alone["end"], atol=1e-5)
    added = [name for name in alone["start"] if ".lora_B." in name]
    assert bool(added) == ("peft" in str(changes) or "lora" in str(changes))
    assert all((alone["start"][name] == 0).all() for name in added)
    assert all((alone["end"][name] != 0).any() for name in added)


def test_a_new_head_has_initial_values(tmp_path: Path) -> None:
    transformers.BertModel(transformers.BertConfig(**BERT)).save_pretrained(tmp_path / "bert")
    with pytest.warns(UserWarning, match=r"lack 2 tensors of BertForSequence.*classifier\.bias"):
        trainer = Trainer(
            device="cpu",
            model_dir=tmp_path / "run",
            model=lambda: HfModel(
                auto_class="AutoModelForSequenceClassification",
                pretrained_model_name_or_path=str(tmp_path / "bert"),
                init_device="meta",
            ),
        )
    weight: Any = trainer.model.model.classifier.weight  # type: ignore[union-attr]
    assert 0 < weight.std() < 0.05


BERT = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
