"""SIGKILL at random instants of a run that saves at every step, until it is done."""

from __future__ import annotations

import pytest

from tests.reliability.runs import Run, instants

KILLED = -9
PLANS = {
    "plain": {},
    "asynchronous": {"asynchronous": True, "keep": 3},
    "workers": {"workers": 2, "accumulate": 3, "keep": 2, "steps": 20},
    "workers_asynchronous": {"workers": 2, "asynchronous": True},
}
KILLS = {"plain": 4, "asynchronous": 4, "workers": 2}
TRIALS = [(name, KILLS[name]) for name in KILLS]
TRIALS += [pytest.param(name, 250, marks=pytest.mark.soak) for name in PLANS]


def kill_until_done(run: Run, seed: int, longest_s: float) -> tuple[int, int]:
    """Return how often it was killed, and how much it left behind at most."""
    kills = most_left = 0
    for after_s in instants(seed, longest_s):
        code = run.killed_after(after_s).code
        most_left = max(most_left, len(run.leftovers()))
        if code != KILLED:
            assert code == 0
            return kills, most_left
        kills += 1
    raise AssertionError(f"not done after {kills} kills")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kills"), TRIALS)
def test_a_run_that_is_killed_at_random_instants_ends_as_if_it_had_not_been(
    runs, count, name, kills
) -> None:
    plan = PLANS[name]
    unbroken = runs.unbroken(**plan)
    total = most_left = lost = compared = orphans = unequal = starts = 0
    seed = 0
    while total < kills:
        run = runs.new(**plan)
        killed, left = kill_until_done(run, seed, 0.5 * unbroken.seconds)
        total += killed
        most_left = max(most_left, left)
        lost += run.num_lost()
        compared += run.num_compared()
        starts += len(run.ends)
        orphans += sum(ended.orphans for ended in run.ends)
        unequal += len(run.differing(unbroken)) + (run.result != unbroken.result)
        seed += 1
    count(kills=total, starts=starts, batches_compared=compared, unequal=unequal)
    count(acknowledged_lost=lost, orphans=orphans, most_left_behind=most_left)
    assert (lost, unequal, orphans) == (0, 0, 0)
    # What the thread that saves was writing, besides what the run was deleting.
    assert most_left <= 1 + plan.get("asynchronous", False)
