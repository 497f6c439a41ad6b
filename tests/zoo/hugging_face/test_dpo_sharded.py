"""Preferences with a policy of `transformers` in several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from modelzoo_trainer.callbacks import Lora
from modelzoo_trainer.zoo.models.dpo import Dpo
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from tests.distributed.ranks import run_ranks
from tests.zoo.hugging_face.dpo_cases import LLAMA, PEFT, rows_of, trainer_of
from tests.zoo.hugging_face.hf_cases import language_batch

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("peft", reason="needs peft")
pytestmark = pytest.mark.slow

SHARD: dict[str, Any] = {"parallel": {"shard": -1}}
PROMPT = language_batch()["input_ids"]


def fit(rank: int, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Train for two steps of four pairs; return the weights before and after, and some tokens."""
    options = dict(options)
    backend = options.pop("backend", {})
    callbacks: list[Any] = [Lora({"r": 4, "target_modules": ["q_proj"]})]
    callbacks = callbacks if options.pop("lora", False) else []
    torch.manual_seed(rank)
    trainer = trainer_of(
        folder,
        lambda: Dpo(policy_model={**LLAMA, **options}),
        2,
        backend=backend,
        callbacks=callbacks,
    )
    before = host(trainer)
    rows: Any = rows_of(8)
    trainer.fit(DataLoader(rows, batch_size=4 // trainer.backend.comm.world_size))
    model: Any = trainer.model
    return {
        "before": before,
        "after": host(trainer),
        "tokens": model.generate(PROMPT, 2, temperature=0.0).tolist(),
    }


def host(trainer: Any) -> dict[str, Tensor]:
    found = trainer.backend.host_state(dict(trainer.model.state_dict()))
    return {name: value.clone() for name, value in found.items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor], atol: float = 0) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], atol=atol, rtol=0, msg=name)


def reference(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that no step may change, by their names in the policy."""
    part = "ref_model." if any(name.startswith("ref_model.") for name in state) else "policy_model."
    return {
        name.removeprefix(part).replace(".base_layer.", "."): value
        for name, value in state.items()
        if name.startswith(part) and ".lora_" not in name
    }


CASES: dict[str, dict[str, Any]] = {
    "copy": {"backend": SHARD},
    "adapters": {"backend": SHARD | {"activation_checkpointing": "full"}, "peft_config": PEFT},
    "callback": {"backend": SHARD, "lora": True},
    "scratch": {"backend": SHARD},
}


def options_of(kind: str, folder: Path) -> dict[str, Any]:
    weights = {"config": None, "pretrained_model_name_or_path": str(folder / "folder")}
    return {"init_device": "meta", **({} if kind == "scratch" else weights), **CASES[kind]}


def fit_all(rank: int, folder: Path) -> dict[str, dict[str, Any]]:
    return {kind: fit(rank, folder / kind, options_of(kind, folder)) for kind in CASES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    torch.manual_seed(3)
    HfCausalLm(config=LLAMA["config"]).save_pretrained(path / "folder")
    return path


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[dict[str, dict[str, Any]]]:
    """Return what each of two processes found, in each case."""
    return run_ranks(2, fit_all, folder)


@pytest.mark.parametrize("kind", CASES)
def test_two_processes_are_as_one(kind: str, runs: Any, folder: Path) -> None:
    alone = fit(0, folder / "alone" / kind, options_of(kind, folder) | {"backend": {}})
    for one in (found[kind] for found in runs):
        same(one["before"], alone["before"])
        same(one["after"], alone["after"], atol=1e-4)  # Adam divides gradients that are rounding
        same(reference(one["after"]), reference(alone["before"]))
        assert one["tokens"] == alone["tokens"]
    moved = {
        name for name, value in alone["after"].items() if not value.equal(alone["before"][name])
    }
    assert moved
    assert all(name.startswith("policy_model.") for name in moved)
    first = load_file(folder / "folder" / "model.safetensors")
    if kind == "scratch":
        first = {
            name.removeprefix("policy_model.model."): value
            for name, value in alone["before"].items()
            if name.startswith("policy_model.")
        }
    found = reference(alone["before"])
    same({name.removeprefix("model."): value for name, value in found.items()}, first)
