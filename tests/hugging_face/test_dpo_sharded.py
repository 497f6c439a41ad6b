"""Preferences with a policy of `transformers` in several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from modelzoo_trainer.callbacks import Lora
from modelzoo_trainer.models.dpo import Dpo
from modelzoo_trainer.models.hugging_face.causal_lm import HfCausalLm
from tests.distributed.ranks import run_ranks
from tests.hugging_face.dpo_cases import LLAMA, PEFT, POLICIES, rows_of, trainer_of
from tests.hugging_face.hf_cases import language_batch

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
    world = trainer.backend.comm.world_size
    trainer.fit(DataLoader(rows_of(8), batch_size=4 // world))
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
}


@pytest.mark.parametrize("kind", CASES)
def test_two_processes_are_as_one(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    first = HfCausalLm(config=LLAMA["config"])
    first.save_pretrained(tmp_path / "folder")
    options = {
        "config": None,
        "pretrained_model_name_or_path": str(tmp_path / "folder"),
        "init_device": "meta",
        **CASES[kind],
    }
    found = run_ranks(2, fit, tmp_path / "2", options)
    alone = fit(0, tmp_path / "1", options | {"backend": {}})
    for one in found:
        same(one["before"], alone["before"])
        same(one["after"], alone["after"], atol=1e-5)
        same(reference(one["after"]), dict(first.state_dict()))
        assert one["tokens"] == alone["tokens"]
    moved = {
        name for name, value in alone["after"].items() if not value.equal(alone["before"][name])
    }
    assert moved
    assert all(name.startswith("policy_model.") for name in moved)


@pytest.mark.parametrize("kind", POLICIES)
def test_initial_values_do_not_depend_on_the_number_of_processes(kind: str, tmp_path: Path) -> None:
    options = {"init_device": "meta", **POLICIES[kind]}
    found = run_ranks(2, fit, tmp_path / "2", options | {"backend": SHARD})
    alone = fit(0, tmp_path / "1", options)
    for one in found:
        same(one["before"], alone["before"])
        same(one["after"], alone["after"], atol=1e-5)
    if kind == "copy":
        policy = {
            name.removeprefix("policy_model."): value
            for name, value in alone["before"].items()
            if name.startswith("policy_model.")
        }
        same(reference(alone["before"]), policy)
