"""Folders of Hugging Face, written during training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelzoo_trainer import Trainer
from modelzoo_trainer.callbacks import HuggingFaceCheckpoint, TrainingLoop
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.dpo import Dpo
from modelzoo_trainer.zoo.models.gpt2 import Gpt2
from tests.distributed.engines import whole
from tests.distributed.ranks import run_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "filter_size": 8,
    "max_position_embeddings": 4,
}
BATCH = {"input_ids": torch.arange(4)[None], "labels": torch.arange(4)[None]}


def make(home: Path, model: Any = None, parallel: Any = None, **options: Any) -> Trainer:
    return Trainer(
        model=model or (lambda: Gpt2(**SIZES)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
        backend=None if parallel is None else {"parallel": parallel},
        loop=TrainingLoop(max_steps=3),
        model_dir=home,
        checkpoint=None,
        callbacks=[HuggingFaceCheckpoint(**options)],
        progress="none",
    )


def test_folders_are_written_by_steps_and_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 15}}}))
    options = {"steps": 2, "tokenizer": str(tmp_path / "tokenizer.json"), "dtype": "bfloat16"}
    with make(tmp_path / "run", **options) as trainer:
        trainer.fit([BATCH] * 4)
        expected = trainer.model.token_embeddings.weight
    assert sorted(path.name for path in (tmp_path / "run").glob("hf_*")) == ["hf_2", "hf_3"]
    folder = tmp_path / "run/hf_3"
    found = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    assert torch.equal(found, expected.detach().bfloat16())
    assert json.loads((folder / "config.json").read_text())["model_type"] == "gpt2"
    assert (folder / "tokenizer.json").is_file()


def test_of_a_run_on_preferences_the_policy_is_written(tmp_path: Path) -> None:
    batch = {
        f"{answer}_{name}": value
        for answer in ("chosen", "rejected")
        for name, value in (BATCH | {"attention_mask": torch.ones(1, 4)}).items()
    }
    batch["chosen_labels"] = batch["chosen_labels"] + 1
    model = Dpo(policy_model={"name": "gpt2", **SIZES})
    with make(tmp_path, lambda: model) as trainer:
        trainer.fit([batch] * 4)
    found = load_file(tmp_path / "hf_3" / "model.safetensors")["transformer.wte.weight"]
    assert torch.equal(found, model.policy_model.state_dict()["token_embeddings.weight"])
    assert not torch.equal(found, model.state_dict()["ref_model.token_embeddings.weight"])


def test_the_factors_of_mup_are_multiplied_into_the_weights(tmp_path: Path) -> None:
    mup = {"mup_base_hidden_size": 4, "mup_base_filter_size": 4, "embeddings_scale": 3.0}
    with make(tmp_path, lambda: Gpt2(**SIZES, **mup)) as trainer:
        trainer.fit([BATCH] * 4)
        expected = trainer.model.token_embeddings.weight.detach()
    found = load_file(tmp_path / "hf_3/model.safetensors")
    torch.testing.assert_close(found["transformer.wte.weight"], expected * 3)
    torch.testing.assert_close(found["lm_head.weight"], expected / 2)  # 4 of 8 dimensions


def test_what_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    def refused(text: str, model: Any = None, **options: Any) -> None:
        with pytest.raises(ConfigError, match=text), make(tmp_path, model, **options) as trainer:
            trainer.fit([BATCH])

    refused("is Linear", lambda: torch.nn.Linear(1, 1))
    refused("norm_type: rmsnorm", lambda: Gpt2(**SIZES, norm_type="rmsnorm"), family="gpt2")
    refused("'gpt3' is unknown", family="gpt3")
    adapted = Gpt2(**SIZES)
    adapted.layers[0].base_layer = torch.nn.Linear(1, 1)
    refused("is no LoRA", lambda: adapted)
    refused("adapters of models of transformers", merge_adapters=False)
    refused("no folder", tokenizer="./nowhere")
    refused("never write", at_end=False)
    refused("once", folder="hf")
    refused("shard_size", shard_size="big")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 16}}}))
    refused("ids up to 16", tokenizer=str(tmp_path / "tokenizer.json"))


def train(rank: int, folder: Path) -> bool:
    with make(folder, parallel={"shard": -1}) as trainer:
        trainer.fit([BATCH] * 6)
        weight = whole(trainer.model.token_embeddings.weight).detach()
    found = load_file(folder / "hf_3/model.safetensors")["transformer.wte.weight"]
    return torch.equal(found, weight) and not list(folder.glob(".tmp*"))


@pytest.mark.slow
def test_a_sharded_model_is_written_once(tmp_path: Path) -> None:
    assert run_ranks(2, train, tmp_path) == [True, True]
