"""SIGKILL of runs with snapshots in memory: they resume from the newest one, bit by bit."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability.runs import Run, instants

pytestmark = pytest.mark.slow

KILLED = -signal.SIGKILL
EVERY, ON_DISK = 3, 20
PLANS = {
    "plain": {"every": ON_DISK, "memory": EVERY},
    "asynchronous": {"every": ON_DISK, "memory": EVERY, "asynchronous": True, "keep": 1},
    "accumulated": {"every": ON_DISK, "memory": 1, "accumulate": 3, "workers": 2, "steps": 20},
}
MAX_USES = 2  # of one snapshot


@pytest.fixture
def memory() -> Iterator[str]:
    """Return a folder in memory."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("there is no /dev/shm")
    with tempfile.TemporaryDirectory(dir=shared) as name:
        yield name


def steps_lost(run: Run, every: int, accumulate: int) -> list[int]:
    """Return how many steps each attempt repeated, with a snapshot after every few steps.

    Without those after two attempts that may have used the newest snapshot, which is then not used
    again: an attempt may have loaded it and been killed before it said so, or before the next one.
    """
    lost, reached, uses = [], 0, 0
    for attempt in run.attempts:
        if attempt.begin is not None and uses < MAX_USES:
            lost.append(reached - attempt.begin)
        if attempt.start is not None:
            reached = max(max(attempt.batches, default=0) // accumulate, attempt.start)
        num_done = (max(attempt.batches, default=1) - 1) // accumulate
        wrote_one = num_done // every > (attempt.begin or 0) // every
        uses = 0 if wrote_one else uses + 1
    return lost


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kills", [4, pytest.param(150, marks=pytest.mark.soak)])
def test_a_run_that_is_killed_at_random_instants_repeats_few_steps(
    runs, count, name, kills, memory
) -> None:
    plan = PLANS[name]
    accumulate = plan.get("accumulate", 1)
    unbroken = runs.unbroken(**{key: plan[key] for key in plan if key != "memory"})
    total = unequal = compared = from_memory = seed = 0
    longest = 0
    while total < kills:
        run = runs.new(**plan, memory_path=memory)
        for after_s in instants(f"{name} {seed}", 0.5 * unbroken.seconds):
            if run.killed_after(after_s).code != KILLED:
                break
            total += 1
        assert run.ends[-1].code == 0
        lost = steps_lost(run, plan["memory"], accumulate)
        longest = max([longest, *lost])
        starts = [one.start for one in run.attempts if one.start]
        from_memory += sum(start % ON_DISK != 0 for start in starts)
        compared += run.num_compared()
        unequal += len(run.differing(unbroken)) + (run.result != unbroken.result)
        assert list(Path(memory).glob("*/*")) == []
        seed += 1
    count(kills=total, batches_compared=compared, unequal=unequal, from_memory=from_memory)
    count(most_steps_repeated=longest)
    assert unequal == 0
    assert longest <= plan["memory"] + 1


def test_a_crash_of_a_second_run_in_its_folder_uses_its_own_snapshots(runs, memory) -> None:
    first = runs.new(**PLANS["plain"], memory_path=memory)
    assert first.once(die_at=8).code == KILLED
    second = runs.new(**PLANS["plain"], memory_path=memory)
    assert second.once().code == 0
    assert second.attempts[0].start == 0
    assert first.once().code == 0
    assert first.attempts[1].start == 6
