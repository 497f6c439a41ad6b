"""Parameters and second optimizers in several processes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.callbacks.lora import Lora
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Net, samples

pytestmark = pytest.mark.slow

ENGINES = {
    "replicated": None,
    "sharded": {"parallel": {"shard": -1}},
    "drawn late": {"parallel": {"shard": -1}, "sharding": {"meta_init": True}},
    "split": {"parallel": {"tensor": 2}},
}


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("modelzoo_trainer").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


class StepsHead(Callback):
    def on_after_optimizer_step(self, trainer, model, optimizer):
        trainer.head_optimizer.step()
        trainer.head_optimizer.zero_grad()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def make(folder: Path, max_steps: int, backend: Any, **settings: Any) -> Trainer:
    return Trainer(
        **{
            "device": "cpu",
            "backend": backend,
            "model_dir": folder,
            "model": lambda: Net(None),
            "optimizer": lambda model: adam(model.parameters()),
            "loop": TrainingLoop(max_steps=max_steps),
            "checkpoint": Checkpoint(steps=2),
            "seed": 1,
            **settings,
        }
    )


def fit(trainer: Trainer) -> None:
    trainer.fit(DataLoader(samples(24), batch_size=2))
    trainer.close()


def train_twice(rank: int, folder: Path, backend: Any) -> tuple[Any, ...]:
    warned = Warnings()
    weights, moments = [], []
    for name, steps in (("whole", 4), ("run", 2), ("run", 4)):
        trainer = make(
            folder / name,
            steps,
            backend,
            optimizer=lambda model: adam(model.blocks.parameters()),
            callbacks=[StepsHead()],
        )
        trainer.head_optimizer = adam(trainer.model.head.parameters())
        fit(trainer)
        state = dict(trainer.model.state_dict())
        moment = trainer.head_optimizer.state_dict()["state"][0]["exp_avg"]
        host = trainer.backend.host_state({**state, "moment": moment})
        moments.append(host.pop("moment").tolist())
        weights.append({key: value.tolist() for key, value in host.items()})
    return weights[0] == weights[2], moments[0] == moments[2], any(moments[0][0]), warned.lines


# CI: replicated, split, and sharded with values that are drawn late.
@pytest.mark.soak_cases("sharded")
@pytest.mark.parametrize("name", ENGINES)
def test_a_second_optimizer_is_resumed_exactly_by_all_processes(tmp_path, name) -> None:
    found = run_ranks(2, train_twice, tmp_path, ENGINES[name])
    assert found == [(True, True, True, [])] * 2


def train_adapters(rank: int, folder: Path, backend: Any) -> list[str]:
    warned = Warnings()
    lora = Lora({"r": 2, "target_modules": ["up"]})
    fit(make(folder, 2, backend, callbacks=[lora]))
    return warned.lines


# CI: sharded.
@pytest.mark.soak_cases("replicated")
@pytest.mark.parametrize("name", ["replicated", "sharded"])
def test_adapters_are_neither_foreign_nor_missing(tmp_path, name) -> None:
    pytest.importorskip("peft")
    assert run_ranks(2, train_adapters, tmp_path, ENGINES[name]) == [[], []]


def train_with_instance(rank: int, folder: Path, backend: Any) -> str:
    model = Net(None)
    trainer = make(folder, 2, backend, model=model, optimizer=adam(model.parameters()))
    try:
        fit(trainer)
    except ConfigError as error:
        trainer.close()
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "is_refused"), [("replicated", False), ("sharded", True)])
def test_an_optimizer_from_before_the_model_was_sharded_is_refused(
    tmp_path, name, is_refused
) -> None:
    for told in run_ranks(2, train_with_instance, tmp_path, ENGINES[name]):
        assert ("none of its 10 parameters" in told) == is_refused
