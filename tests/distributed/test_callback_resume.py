"""Two processes with callbacks that have state, killed three times and resumed: equal."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from modelzoo_trainer import Callback, checkpointing
from modelzoo_trainer.callbacks import EarlyStopping, ModelEma, TerminateOnNaN
from tests.distributed.ranks import run_ranks, try_ranks
from tests.distributed.training import make_trainer, samples

pytestmark = pytest.mark.slow

ENGINES = {"replicated": {}, "sharded": {"parallel": {"shard": -1}}}
KILLED = (False, f"ended with exit code {-signal.SIGKILL}")
KILLS = [4, 7, 9]
FOREVER_S = 1000.0


class Die(Callback):
    """Kills all processes when a step has been taken and its checkpoint written."""

    def __init__(self, at_step: int | None) -> None:
        self.at_step = at_step

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.global_step == self.at_step:
            pids = trainer.backend.comm.gather_object(os.getpid())
            if trainer.backend.comm.is_main:  # one kills all, so that none has the time to see it
                for pid in reversed(pids):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(FOREVER_S)


class Spoil(Callback):
    """Makes one batch of one process infinite."""

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.global_step == 5 and trainer.backend.comm.rank == 1:
            batch[0].fill_(math.inf)


def fit(
    rank: int, folder: Path, make: Callable[[], Any], backend: dict[str, Any], die_at: int | None
) -> dict[str, Any]:
    """Train on 24 samples, 2 a process and step, and return what came of it."""
    callback = make()
    trainer = make_trainer(
        folder,
        backend=backend,
        callbacks=[callback, Die(die_at), *([Spoil()] if make is ending else [])],
        max_steps=12,
        save=1,
        eval_frequency=2,
    )
    data = DataLoader(samples(24), batch_size=2, shuffle=True)
    trainer.fit(data, DataLoader(samples(8), batch_size=2))
    weights = trainer.backend.host_state(dict(trainer.model.state_dict()))
    return {
        "step": trainer.global_step,
        "reason": trainer.early_exit.reason,
        "weights": {name: value.tolist() for name, value in weights.items()},
        "rows": trainer.metrics.rows,
    }


def saved(folder: Path, name: str) -> Any:
    """Return what the newest checkpoint has of a callback, with lists in place of tensors."""
    newest = checkpointing.list_checkpoints(folder)[-1].path
    return plain(checkpointing.load(newest)["callbacks"][name])


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def check(tmp_path: Path, make: Callable[[], Any], backend: dict[str, Any]) -> dict[str, Any]:
    """Compare a run that is killed with one that is not; return what came of the first process."""
    unbroken = run_ranks(2, fit, tmp_path / "unbroken", make, backend, None)
    for step in KILLS:
        assert try_ranks(2, fit, tmp_path / "broken", make, backend, step) == [KILLED, KILLED]
    resumed = run_ranks(2, fit, tmp_path / "broken", make, backend, None)
    assert [since(found) for found in resumed] == [since(found) for found in unbroken]
    assert since(unbroken[0])["rows"]
    name = type(make()).__name__
    assert saved(tmp_path / "broken", name) == saved(tmp_path / "unbroken", name)
    return unbroken[0]


def since(found: dict[str, Any]) -> dict[str, Any]:
    """Return what came of a run, of its metrics those after the last kill."""
    return found | {"rows": [row for row in found["rows"] if row[0] > KILLS[-1]]}


def averaging() -> ModelEma:
    return ModelEma(0.7, warmup=True)


def stopping() -> EarlyStopping:
    return EarlyStopping("validate_0/loss", patience=4, min_delta=10.0)


def ending() -> TerminateOnNaN:
    return TerminateOnNaN()


# CI: sharded, where each process has a part; whole ones are resumed by the next test.
@pytest.mark.soak_cases("replicated")
@pytest.mark.parametrize("engine", ENGINES)
def test_an_average_goes_on(tmp_path, engine):
    found = check(tmp_path, averaging, ENGINES[engine])
    assert found["step"] == 12
    assert any("ema/validate_0/loss" in row for _, row in found["rows"])


# CI: replicated; sharded states are resumed by the test before.
@pytest.mark.soak_cases("sharded")
@pytest.mark.parametrize("engine", ENGINES)
def test_what_ends_a_run_early_goes_on(tmp_path, engine):
    found = check(tmp_path, stopping, ENGINES[engine])
    assert found["step"] == 10
    assert re.match(r"EarlyStopping: validate_0/loss .*\b4 values\b", found["reason"])
    [first, second] = run_ranks(2, fit, tmp_path / "broken", stopping, ENGINES[engine], None)
    assert first["weights"] == second["weights"] == found["weights"]
    assert first["step"] == 10


def test_a_run_that_a_bad_step_has_ended_takes_no_other_when_it_is_resumed(tmp_path):
    first = run_ranks(2, fit, tmp_path, ending, {}, None)
    again = run_ranks(2, fit, tmp_path, ending, {}, None)
    assert 5 < first[0]["step"] < 12
    assert [found["step"] for found in again] == [first[0]["step"]] * 2
    assert [found["weights"] for found in again] == [found["weights"] for found in first]
    assert again[0]["reason"].startswith("TerminateOnNaN stopped this run before")
