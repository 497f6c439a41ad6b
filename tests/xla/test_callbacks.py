"""Every shipped callback on an XLA device: the numbers of the host, and what a step costs."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    ConfigError,
    Logging,
    Trainer,
    TrainingLoop,
    callbacks,
    checkpointing,
)
from tests.callback_makers import MAKERS, SETTINGS, GeneratingNet
from tests.doubles import History

TIMED: Final = {"DurationProfiler", "FlopUtilization", "RateProfiler"}  # those that log durations
WATCHED: Final = (  # those that compute in the step
    "CheckLoss",
    "ComputeNorm",
    "ComputeNormGNS",
    "EarlyStopping",
    "LogSparsity",
    "ModelEma",
    "NaNChecker",
    "NormTensorListener",
    "SelectiveGrad",
    "SpikeDetection",
    "SummaryTensorListener",
    "TerminateOnNaN",
)
NUM_STEPS: Final = 13
EVAL_STEPS: Final = 4


class Meter(Callback):
    """Notes the backend's counts after each step, before a validation."""

    def __init__(self) -> None:
        self.counts: list[dict[str, int]] = []

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        self.counts.append(trainer.backend.counters())

    def added(self, name: str) -> dict[int, int]:
        """What came from the step before up to each step."""
        pairs = zip(self.counts, self.counts[1:], strict=False)
        return {step: now[name] - then[name] for step, (then, now) in enumerate(pairs, 2)}


def data(num: int, size: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator))
        for _ in range(num)
    ]


def fit(
    name: str,
    folder: Path,
    *others: Callback,
    device: str = "xla",
    max_steps: int = 6,
    eval_steps: int = 3,
    log_steps: int = 2,
    size: int = 8,
) -> tuple[dict[tuple[int, str], Any], dict[str, Tensor]]:
    """Train with a callback; return all metrics by step and name, and the weights."""
    history = History()
    settings: dict[str, Any] = {
        "device": device,
        "model_dir": folder / device,
        "model": GeneratingNet,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "loop": TrainingLoop(max_steps=max_steps, eval_frequency=eval_steps),
        "logging": Logging(log_steps=log_steps),
        "callbacks": [MAKERS[name](), *others],
        "loggers": history,
        "seed": 0,
    }
    with Trainer(**(settings | SETTINGS.get(name, {}))) as trainer:
        trainer.fit(data(max_steps, size), data(2, size))
        weights = trainer.backend.host_state(trainer.model.state_dict())
    metrics = {(step, key): value for step, row in history.lines for key, value in row.items()}
    return metrics, weights


def files_in(folder: Path) -> list[str]:
    """Return the names of all files; the folder of a run's logs is called after the time."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    return sorted(re.sub(r"\d{8}_\d{6}", "<time>", name) for name in names)


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - {"LRFinder"}))
def test_a_run_with_it_is_that_of_the_host(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    if name == "Lora":
        pytest.importorskip("peft")
    found, warned = {}, {}
    for device in ("cpu", "xla"):
        caplog.clear()
        found[device] = fit(name, tmp_path, device=device)  # a host read in the step is an error
        warned[device] = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    (metrics, weights), (own, own_weights) = found["cpu"], found["xla"]
    assert warned["xla"] == warned["cpu"]
    assert own.keys() == metrics.keys()
    assert files_in(tmp_path / "xla") == files_in(tmp_path / "cpu")
    if name in TIMED:
        metrics = {key: value for key, value in metrics.items() if key[1].endswith("loss")}
    assert {(6, "loss"), (6, "validate_0/loss")} <= metrics.keys()
    same = {key: own[key] for key in metrics}
    torch.testing.assert_close(same, metrics, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(own_weights, weights, rtol=1e-4, atol=1e-6)


def test_learning_rates_are_not_tested_where_each_would_compile_a_graph(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"LRFinder.* compiles a graph for each learning rate"):
        fit("LRFinder", tmp_path, device="xla")


@pytest.mark.parametrize("name", WATCHED)
def test_after_the_third_step_nothing_compiles_and_a_step_is_one_graph(
    tmp_path: Path, name: str
) -> None:
    meter = Meter()
    size = 16 + WATCHED.index(name)  # else a graph may be that of another test
    fit(name, tmp_path, meter, max_steps=NUM_STEPS, eval_steps=EVAL_STEPS, log_steps=5, size=size)
    assert len(meter.counts) == NUM_STEPS
    after_validation = range(EVAL_STEPS + 1, NUM_STEPS + 1, EVAL_STEPS)
    late = {step: num for step, num in meter.added("compilations").items() if step > 3}
    late.pop(after_validation[0])  # the first validation compiles
    assert set(late.values()) == {0}
    executions = meter.added("executions")
    usual = {step: executions[step] for step in range(4, NUM_STEPS + 1)}
    assert {num for step, num in usual.items() if step not in after_validation} == {1}
    assert meter.counts[-1]["fallbacks"] == meter.counts[0]["fallbacks"]
    assert meter.counts[-1]["late_compilations"] == meter.counts[0]["late_compilations"]


def with_average() -> list[Callback]:
    return [
        callbacks.TerminateOnNaN(),
        callbacks.ModelEma(0.9, warmup=True),
        callbacks.SelectiveGrad({"param_filter": "layers.*"}),
        callbacks.EarlyStopping("loss", patience=100),
    ]


def leaving_out() -> list[Callback]:
    return [
        callbacks.CheckLoss("skip", spike_window=8),
        callbacks.ModelEma(0.9, validate=False),
    ]


def train(folder: Path, made: list[Callback], max_steps: int, bad: list[int]) -> dict[str, Any]:
    """Train or go on; return the last checkpoint."""
    batches = data(NUM_STEPS, 12)
    for idx in bad:
        batches[idx][0].fill_(math.nan)
    with Trainer(
        device="xla",
        model_dir=folder,
        model=GeneratingNet,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
        loop=TrainingLoop(max_steps=max_steps),
        checkpoint=Checkpoint(steps=6),
        logging=Logging(log_steps=5),
        callbacks=made,
        loggers=(),
        seed=0,
    ) as trainer:
        trainer.fit(batches)
    return checkpointing.load(folder / f"checkpoint_{max_steps}")


@pytest.mark.parametrize(("make", "bad"), [(with_average, []), (leaving_out, [4, 8])])
def test_those_that_decide_about_steps_work_together_and_go_on_after_a_stop(
    tmp_path: Path, make: Callable[[], list[Callback]], bad: list[int]
) -> None:
    meter = Meter()
    whole = train(tmp_path / "whole", [*make(), meter], 12, bad)
    train(tmp_path / "parts", make(), 6, bad)
    parts = train(tmp_path / "parts", make(), 12, bad)
    assert whole["callbacks"].keys() == {type(one).__name__ for one in make()}
    for key in ("model", "callbacks"):
        torch.testing.assert_close(parts[key], whole[key], rtol=0, atol=0)
    assert all(value.isfinite().all() for value in whole["model"].values())
    assert {num for step, num in meter.added("compilations").items() if step > 3} == {0}
    assert set(meter.added("executions").values()) == {1}
    assert set(meter.added("fallbacks").values()) == {0}
