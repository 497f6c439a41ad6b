"""Two runs on one directory; a restart right after kill -9, while its workers may live."""

from __future__ import annotations

import socket

import pytest
from reliability.runs import Run

KILLED = -9


def wait_until_it_trains(run: Run, child) -> None:
    while not (run.place / "events.txt").exists() and not child.has_ended(0.005):
        pass


@pytest.mark.parametrize("times", [1, pytest.param(25, marks=pytest.mark.soak)])
def test_a_second_run_is_refused_and_the_first_is_not_disturbed(runs, count, times) -> None:
    unbroken = runs.unbroken(slow="step", steps=24)
    for _ in range(times):
        run = runs.new(slow="step", steps=24)
        first = run.start()
        wait_until_it_trains(run, first)
        second = run.start()
        assert second.wait().code == 1
        said = runs.nursery.said()
        assert f"in use by process {first.pid} on {socket.gethostname()}" in said
        assert run.end(first.wait()).code == 0
        assert run.result == unbroken.result
    count(refused=times)


@pytest.mark.parametrize("times", [2, pytest.param(60, marks=pytest.mark.soak)])
def test_a_run_is_restarted_at_once_after_its_process_was_killed(runs, count, times) -> None:
    run = runs.new(workers=2, slow="data", steps=400)
    orphans = 0
    for _ in range(times):
        child = run.start()
        wait_until_it_trains(run, child)
        child.has_ended(0.05)
        child.send(9)
        child.has_ended(1)
        ended, after = run.start(), None
        after = ended.has_ended(0.2)  # a run that is refused ends at once
        assert not after, runs.nursery.said()[-3000:]
        ended.send(9)
        orphans += run.end(child.wait()).orphans + run.end(ended.wait()).orphans
    count(restarts=times, refused=0, orphans=orphans)
    assert orphans == 0
