"""Callbacks in several processes: what one finds, all act on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer import Callback
from modelzoo_trainer.callbacks import CheckLoss, ComputeNorm, CountParams, SaveBest
from modelzoo_trainer.callbacks.spike_detection import SpikeDetection
from modelzoo_trainer.checkpointing import list_checkpoints, load
from modelzoo_trainer.errors import StopTraining
from tests.distributed.ranks import run_ranks
from tests.distributed.training import make_trainer, samples
from tests.hooks.test_table import ComparesTables

FSDP2 = {"parallel": {"shard": -1}}
ENDLESS = 100_000  # epochs


def fit(rank: int, folder: Path, callbacks: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Train on 24 samples in order, 2 a process and step; return what came of it."""
    options = dict(options)
    inputs, mask = samples(24).tensors
    spoilt = options.pop("spoilt", None)
    if spoilt is not None:
        inputs[spoilt] = math.nan
    made = callbacks()
    trainer = make_trainer(folder, callbacks=made, **options)
    data = DataLoader(TensorDataset(inputs, mask), batch_size=2)
    trainer.fit(data, DataLoader(samples(8), batch_size=2))
    weights = trainer.backend.host_state(list(trainer.model.parameters()))
    return {
        "step": trainer.global_step,
        "reason": trainer.early_exit.reason,
        "weights": torch.cat([weight.flatten() for weight in weights]).tolist(),
        "rows": trainer.metrics.rows,
        "passed_over": sorted(trainer.data.skipped),
        "names": sorted(path.name for path in folder.glob("*checkpoint*")),
        "told": [getattr(callback, "told", None) for callback in made],
    }


def equal_weights(found: list[dict[str, Any]]) -> None:
    assert found[0]["weights"] == found[1]["weights"]
    assert all(map(math.isfinite, found[0]["weights"]))


def skipping() -> list[Any]:
    return [CheckLoss("skip")]


# CI: with shards.
@pytest.mark.soak_cases("DDP")
@pytest.mark.slow_cases("DDP", "FSDP2")
@pytest.mark.parametrize("backend", [{}, FSDP2], ids=["DDP", "FSDP2"])
def test_a_loss_that_is_no_number_in_one_process_leaves_the_step_out_in_all(
    tmp_path, backend
) -> None:
    options = {"epochs": 1, "spoilt": 6, "backend": backend}  # the second step, process 1
    found = run_ranks(2, fit, tmp_path, skipping, options)
    equal_weights(found)
    assert [one["step"] for one in found] == [6, 6]
    assert max(row.get("skipped_steps", 0) for _, row in found[0]["rows"]) == 1


def going_back() -> list[Any]:
    return [CheckLoss("rollback")]


@pytest.mark.slow
def test_a_loss_that_is_no_number_in_one_process_takes_all_back(tmp_path) -> None:
    options = {"epochs": 1, "spoilt": 11, "save": 1, "backend": {}}  # the third step, process 1
    found = run_ranks(2, fit, tmp_path, going_back, options)
    equal_weights(found)
    assert [one["passed_over"] for one in found] == [[(0, 2)], [(0, 2)]]
    assert [one["step"] for one in found] == [5, 5]


def watching_spikes() -> list[Any]:
    return [SpikeDetection(rtol=1e9)]


# CI: with copies.
@pytest.mark.soak_cases("FSDP2")
@pytest.mark.slow
@pytest.mark.parametrize("backend", [{}, FSDP2], ids=["DDP", "FSDP2"])
def test_a_spike_in_one_process_ends_all_and_its_batches_are_left_out(tmp_path, backend) -> None:
    options = {
        "epochs": 1,
        "spoilt": 11,
        "save": 1,
        "backend": backend,
    }  # the third step, process 1
    with pytest.raises(AssertionError, match="TrainingSpike: loss is nan at global_step 3"):
        run_ranks(2, fit, tmp_path, watching_spikes, options)
    named = json.loads((tmp_path / "skip_batches.json").read_text())
    assert named == {"batches": [[0, 1], [0, 2]], "num_shards": 2}
    found = run_ranks(2, fit, tmp_path, watching_spikes, options)
    equal_weights(found)
    assert [one["passed_over"] for one in found] == [[(0, 2)], [(0, 2)]]
    assert [one["step"] for one in found] == [5, 5]


def doubling() -> list[Any]:
    return [("post-loss", double)]


def double(self: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


@pytest.mark.slow
def test_functions_around_the_step_are_those_of_all_processes(tmp_path) -> None:
    weights = {}
    for name, callbacks, lr in [("doubled", doubling, 0.05), ("plain", list, 0.1)]:
        options = {"epochs": 1, "backend": {}, "lr": lr}  # twice the loss is twice the rate
        found = run_ranks(2, fit, tmp_path / name, callbacks, options)
        equal_weights(found)
        weights[name] = torch.tensor(found[0]["weights"])
    assert torch.allclose(weights["doubled"], weights["plain"], rtol=1e-12, atol=0)


class StopIn(Callback):
    """Asks for the end in one process alone."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how = rank, how

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.backend.comm.rank == self.rank and trainer.global_step == 3:
            if self.how == "raise":
                raise StopTraining("enough")
            trainer.early_exit.stop("enough")


class StopWhen(Callback):
    """Has a condition that holds in one process alone."""

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        trainer.early_exit.register(
            lambda: trainer.backend.comm.rank == 1 and trainer.global_step >= 3
        )


def stopping_0() -> list[Any]:
    return [StopIn(0, "ask")]


def stopping_1() -> list[Any]:
    return [StopIn(1, "raise")]


def stopping_when() -> list[Any]:
    return [StopWhen()]


@pytest.mark.slow_cases("stopping_0", "stopping_1", "stopping_when")
@pytest.mark.parametrize("callbacks", [stopping_0, stopping_1, stopping_when])
def test_a_stop_that_one_process_asks_for_is_that_of_all(tmp_path, callbacks) -> None:
    options = {"epochs": ENDLESS, "backend": {}, "save": 6 * ENDLESS, "eval_frequency": None}
    found = run_ranks(2, fit, tmp_path, callbacks, options)
    equal_weights(found)
    assert found[0]["step"] == found[1]["step"] < 6 * ENDLESS
    assert found[0]["reason"] == found[1]["reason"] != ""
    assert found[0]["names"] == [f"checkpoint_{found[0]['step']}"]


class StopAtMetrics(Callback):
    def on_metrics(self, trainer, metrics, step):
        if "validate_0/loss" in metrics:
            raise StopTraining("validated")


def stopping_at_metrics() -> list[Any]:
    return [StopAtMetrics()]


@pytest.mark.slow
@pytest.mark.slow
def test_a_stop_by_a_metric_of_all_stops_all(tmp_path) -> None:
    options = {"epochs": ENDLESS, "backend": {}, "eval_frequency": 6}
    found = run_ranks(2, fit, tmp_path, stopping_at_metrics, options)
    equal_weights(found)
    assert found[0]["step"] == found[1]["step"] < 6 * ENDLESS


def saving_best() -> list[Any]:
    return [SaveBest("validate_0/loss", k=1), ComputeNorm(), CountParams()]


# CI: with shards.
@pytest.mark.soak_cases("DDP")
@pytest.mark.slow_cases("DDP", "FSDP2")
@pytest.mark.parametrize("backend", [{}, FSDP2], ids=["DDP", "FSDP2"])
def test_the_best_checkpoint_is_written_once_by_all(tmp_path, backend) -> None:
    options = {"epochs": 2, "backend": backend, "eval_frequency": 6}
    found = run_ranks(2, fit, tmp_path, saving_best, options)
    equal_weights(found)
    [best] = list_checkpoints(tmp_path)
    state = load(best.path)
    assert {"model", "optimizer", "callbacks"} <= set(state)
    norms = [row["model_wise_grad_norm"] for _, row in found[0]["rows"] if "loss" in row]
    assert all(map(math.isfinite, norms))


class StopWhenSaved(Callback):
    """Asks for the end when there is a checkpoint of an earlier step."""

    def on_step_boundary(self, trainer: Any) -> None:
        found = list_checkpoints(trainer.model_dir)
        if found and found[0].step < trainer.global_step:
            trainer.early_exit.stop("saved")


def stopping_when_saved() -> list[Any]:
    return [StopWhenSaved()]


@pytest.mark.slow
@pytest.mark.slow
def test_a_checkpoint_that_the_clock_wants_is_written_at_one_step(tmp_path) -> None:
    by_clock = {"checkpoint": {"minutes": 1e-3}, "eval_frequency": None}
    options = {"epochs": ENDLESS, "backend": {}, **by_clock}
    found = run_ranks(2, fit, tmp_path, stopping_when_saved, options)
    equal_weights(found)
    assert len(found[0]["names"]) > 1
    for info in list_checkpoints(tmp_path):
        assert load(info.path)["global_step"] == info.step


def compare_tables(rank: int, folder: Path, grad_accum_steps: int) -> list[bool]:
    compares = ComparesTables()
    trainer = make_trainer(folder, callbacks=[compares], accumulate=grad_accum_steps, max_steps=3)
    trainer.fit(DataLoader(samples(24), batch_size=2))
    return compares.found


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2])
def test_a_fit_finds_the_hook_tables_of_several_processes(tmp_path, num) -> None:
    for found in run_ranks(2, compare_tables, tmp_path, num):
        assert found == [True] * 3 * num
