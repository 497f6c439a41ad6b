"""Decisions about the end of a run, by several processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer import Callback
from modelzoo_trainer.callbacks import CheckLoss, SaveBest
from modelzoo_trainer.callbacks.early_stopping import EarlyStopping
from modelzoo_trainer.callbacks.limit_batches import LimitBatches
from modelzoo_trainer.callbacks.terminate_on_nan import TerminateOnNaN
from tests.distributed.ranks import run_ranks
from tests.distributed.training import make_trainer, samples

FSDP2 = {"parallel": {"shard": -1}}
ENDLESS = 100_000  # epochs
pytestmark = pytest.mark.slow


class Weights(Callback):
    """Keeps the weights of each step."""

    def __init__(self) -> None:
        self.at: dict[int, list[float]] = {}

    def on_step_boundary(self, trainer: Any) -> None:
        self.at[trainer.global_step] = weights_of(trainer)


def weights_of(trainer: Any) -> list[float]:
    found = trainer.backend.host_state(list(trainer.model.parameters()))
    return torch.cat([weight.flatten() for weight in found]).tolist()


def fit(rank: int, folder: Path, callbacks: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Train on 24 samples in order, 2 a process and step; return what came of it."""
    options = dict(options)
    inputs, mask = samples(24).tensors
    spoilt = options.pop("spoilt", None)
    if spoilt is not None:
        inputs[spoilt] = math.nan
    keeper, made = Weights(), callbacks()
    trainer = make_trainer(folder, callbacks=[*made, keeper], **options)
    data = DataLoader(TensorDataset(inputs, mask), batch_size=2)
    trainer.fit(data, DataLoader(samples(8), batch_size=2))
    return {
        "step": trainer.global_step,
        "reason": trainer.early_exit.reason,
        "weights": weights_of(trainer),
        "at": keeper.at,
        "best": [getattr(callback, "best", None) for callback in made],
    }


def early() -> list[Any]:
    return [EarlyStopping("validate_0/loss", patience=2, min_delta=1e9)]


def test_a_metric_that_no_longer_improves_ends_all_at_one_step(tmp_path) -> None:
    options = {"epochs": ENDLESS, "backend": {}, "eval_frequency": 6}
    found = run_ranks(2, fit, tmp_path, early, options)
    assert found[0]["step"] == found[1]["step"] < 6 * ENDLESS
    assert found[0]["reason"] == found[1]["reason"]
    assert "has not improved for 2 values" in found[0]["reason"]


def terminating() -> list[Any]:
    return [CheckLoss(), TerminateOnNaN()]


@pytest.mark.parametrize("backend", [{}, FSDP2], ids=["DDP", "FSDP2"])
def test_a_loss_that_is_no_number_in_one_process_ends_all(tmp_path, backend) -> None:
    options = {"epochs": ENDLESS, "spoilt": 6, "backend": backend}  # the second step, process 1
    found = run_ranks(2, fit, tmp_path, terminating, options)
    assert found[0]["step"] == found[1]["step"] < 6 * ENDLESS
    assert found[0]["weights"] == found[1]["weights"]
    assert all(map(math.isfinite, found[0]["weights"]))
    assert found[0]["at"][2] == found[0]["at"][1]


def best() -> list[Any]:
    return [SaveBest("validate_0/loss", mode="max", load_best=True)]


@pytest.mark.parametrize("backend", [{}, FSDP2], ids=["DDP", "FSDP2"])
def test_all_have_the_best_weights_at_the_end(tmp_path, backend) -> None:
    options = {"epochs": 1, "backend": backend, "eval_frequency": 2}
    found = run_ranks(2, fit, tmp_path, best, options)
    step = found[0]["best"][0][0]["step"]
    assert step < found[0]["step"]
    for one in found:
        assert one["weights"] == one["at"][step]


def limited() -> list[Any]:
    return [LimitBatches(2)]


def test_a_limit_counts_the_batches_of_all(tmp_path) -> None:
    found = run_ranks(2, fit, tmp_path, limited, {"epochs": 3, "backend": {}})
    assert [one["step"] for one in found] == [6, 6]
