"""A worker of the loader is killed, raises, or hangs: an error within the time limit, no orphan."""

from __future__ import annotations

import pytest

from modelzoo_trainer import checkpointing
from tests.reliability.runs import Run

FAILED = 1
TIMEOUT_S = {"hang": 1}  # of the others none is to be late
SAID = {"kill": "DataLoader worker", "raise": "sample 40 cannot be read", "hang": "timed out"}


def failed(runs, fault: str) -> Run:
    run = runs.new(workers=2, fault=fault, timeout_s=TIMEOUT_S.get(fault, 60), steps=12)
    ended = run.once()
    assert ended.code == FAILED
    assert ended.orphans == 0
    return run


@pytest.mark.slow_cases("1-raise")
@pytest.mark.parametrize("fault", ["kill", "raise", pytest.param("hang", marks=pytest.mark.slow)])
@pytest.mark.parametrize("times", [1, pytest.param(12, marks=pytest.mark.soak)])
def test_a_worker_that_fails_ends_the_run_with_a_clear_error(runs, count, fault, times) -> None:
    for _ in range(times):
        before = runs.nursery.said()
        run = failed(runs, fault)
        assert SAID[fault] in runs.nursery.said()[len(before) :]
        assert run.attempts[-1].saved == [
            info.step for info in checkpointing.list_checkpoints(run.folder)
        ]
    count(faults=times, orphans=0)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_a_run_whose_worker_failed_goes_on_when_it_is_started_again(runs, count, fault) -> None:
    plan = {"workers": 2, "steps": 12}
    run = runs.new(**plan)
    assert run.once(fault=fault, timeout_s=60).code == FAILED
    assert run.once().code == 0
    assert run.result == runs.unbroken(**plan).result
    count(faults=1, resumed_equal=1)
