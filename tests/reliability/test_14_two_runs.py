"""Two runs on one directory; a restart right after kill -9, while its workers may live."""

from __future__ import annotations

import socket

import pytest

from tests.reliability.program import GO

PATIENCE_S = 60


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(25, marks=pytest.mark.soak)])
def test_a_second_run_is_refused_and_the_first_is_not_disturbed(runs, count, times) -> None:
    unbroken = runs.unbroken(slow="step", steps=24)
    for _ in range(times):
        run = runs.new(slow="step", steps=24, hold_at=20)
        first = run.start()
        run.wait_for(first, "start")
        second = run.start()
        assert second.wait().code == 1
        (run.place / GO).touch()
        said = runs.nursery.said()
        assert f"in use by process {first.pid} on {socket.gethostname()}" in said
        assert run.end(first.wait()).code == 0
        assert run.result == unbroken.result
    count(refused=times)


@pytest.mark.parametrize("times", [2, pytest.param(60, marks=pytest.mark.soak)])
def test_a_run_is_restarted_at_once_after_its_process_was_killed(runs, count, times) -> None:
    run = runs.new(workers=2, slow="data", steps=100_000)
    orphans = 0
    for _ in range(times):
        first = run.start()
        run.wait_for(first, "start", already=run.num_told("start"))
        first.has_ended(0.05)
        first.send(9)
        assert first.has_ended(PATIENCE_S)
        second = run.start()
        run.wait_for(second, "start", already=run.num_told("start"))
        second.send(9)
        orphans += run.end(first.wait()).orphans + run.end(second.wait()).orphans
    count(restarts=times, refused=0, orphans=orphans)
    assert orphans == 0
