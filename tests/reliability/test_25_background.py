"""Saves by another process: it, or the run, is killed or stopped at random instants."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from modelzoo_trainer import checkpointing
from modelzoo_trainer.checkpointing.frozen_memory import can_protect
from tests.reliability.forkserver import Child
from tests.reliability.program import GO
from tests.reliability.runs import instants
from tests.reliability.states import visible

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_protect(), reason="may not protect memory (userfaultfd)"),
]

WIDE = 1 << 20
PLAN = {"asynchronous": True, "keep": 3, "wide": WIDE}
WAITING = PLAN | {"hold_at": 40}  # so that it has not ended before the test has come to its process
KILLED = -signal.SIGKILL
END_S = 30


def writers_of(pid: int) -> list[int]:
    """Return the processes that write the checkpoints of a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if any(b"frozen_writer" in word for word in words) and str(pid).encode() in words:
                found.append(int(path.parent.name))
    return found


def num_orphans(pid: int) -> int:
    """Return how many of them have not ended a while after the run."""
    deadline = time.monotonic() + END_S
    while (left := writers_of(pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(left)


def wait_for_writer(child: Child) -> int | None:
    """Return the process that writes, once there is one; None = the run has ended before."""
    while not (found := writers_of(child.pid)):
        if child.has_ended(0.005):
            return None
    return found[0]


@pytest.mark.parametrize("kills", [5, pytest.param(150, marks=pytest.mark.soak)])
def test_a_run_that_is_killed_while_another_process_saves_ends_as_if_it_had_not_been(
    runs, count, kills
) -> None:
    unbroken = runs.unbroken(**PLAN)
    total = lost = unequal = orphans = seed = 0
    while total < kills:
        run = runs.new(**PLAN)
        for after_s in instants(seed, 0.5 * unbroken.seconds):
            child = run.start()
            ended = run.end(child.kill_after(after_s))
            orphans += num_orphans(child.pid)
            if ended.code != KILLED:
                break
            total += 1
        assert run.ends[-1].code == 0
        lost += run.num_lost()
        unequal += len(run.differing(unbroken)) + (run.result != unbroken.result)
        seed += 1
    count(kills=total, acknowledged_lost=lost, unequal=unequal, orphans=orphans)
    assert (lost, unequal, orphans) == (0, 0, 0)


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.soak)])
def test_a_run_goes_on_when_the_process_that_saves_is_killed(runs, count, kills) -> None:
    unbroken = runs.unbroken(**PLAN)
    killed = unequal = damaged = orphans = 0
    for seed in range(kills):
        run = runs.new(**WAITING)
        child = run.start()
        writer = wait_for_writer(child)
        assert writer is not None
        child.has_ended(next(instants(seed, 0.5 * unbroken.seconds)))
        with suppress(ProcessLookupError):
            os.kill(writer, signal.SIGKILL)
            killed += 1
        (run.place / GO).touch()
        ended = run.end(child.wait())
        orphans += num_orphans(child.pid)
        assert ended.code == 0
        unequal += run.result != unbroken.result
        damaged += sum(checkpointing.verify(path) != [] for path in visible(run.folder))
        assert run.leftovers() == []
    count(writers_killed=killed, unequal=unequal, undetected=damaged, orphans=orphans)
    assert (unequal, damaged, orphans) == (0, 0, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_of_all_processes_finishes_the_pending_save(runs, count, number) -> None:
    unbroken = runs.unbroken(**PLAN)
    run = runs.new(**WAITING)
    child = run.start()
    writer = wait_for_writer(child)
    assert writer is not None
    os.kill(writer, number)  # as a scheduler does
    child.send(number)
    (run.place / GO).touch()
    ended = run.end(child.wait())
    assert ended.code in (130, 143)
    assert num_orphans(child.pid) == 0
    newest = visible(run.folder)[-1]
    assert newest.name == f"checkpoint_{run.attempts[0].stopped}"
    assert checkpointing.verify(newest) == []
    assert run.once().code == 0
    assert run.result == unbroken.result
    count(signals=1)
