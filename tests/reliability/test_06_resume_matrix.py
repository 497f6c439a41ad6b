"""Killed at step k, in the last validation and at the end, and resumed each time: equal bits."""

from __future__ import annotations

import random
import signal

import pytest

from tests.reliability.runs import Run, Runs

KILLED = -signal.SIGKILL
STOPPED = 143
STEPS = 48
FACTORS = {
    "dropout": (False, True),
    "augment": (False, True),
    "accumulate": (1, 3),
    "workers": (0, 2),
    "validate": (False, True),
    "ema": (False, True),
    "asynchronous": (False, True),
    "every": (1, 4),
    "length": ("max_steps", "num_steps"),
}
# Plackett and Burman's design: every two factors meet in all four ways within twelve runs.
_FIRST = "++-+++---+-"
ROWS = [_FIRST[-shift:] + _FIRST[:-shift] for shift in range(11)] + ["-" * 11]
ALL = "+" * 11


def plan_of(row: str) -> dict:
    return {
        name: values[sign == "+"]
        for (name, values), sign in zip(FACTORS.items(), row, strict=False)
    }


def chained(runs: Runs, plan: dict, kills: list[int]) -> Run:
    """Return a run that was killed at these steps, one after the other, and then went on.

    After its last step it is stopped and killed in its last validation, and killed at its end.
    """
    run = runs.new(**plan)
    for step in kills:
        assert run.once(die_at=step).code == KILLED
    if plan["validate"]:
        assert run.once(end_in="validation", end_by=signal.SIGTERM).code == STOPPED
        assert run.once(end_in="validation").code == KILLED
    assert run.once(end_in="end").code == KILLED
    assert run.once().code == 0
    return run


def chain(first: int) -> list[int]:
    """Return three steps or more, the first one given, if the run has as many left."""
    third = max(1, (STEPS - first) // 3)
    return list(range(first, STEPS + 1, third))[:4]


def check(runs: Runs, count, plan: dict, chains: list[list[int]]) -> None:
    unbroken = runs.unbroken(**plan)
    kills = stops = compared = 0
    unequal = []
    for steps in chains:
        run = chained(runs, plan, steps)
        kills += run.num_ended_by(KILLED)
        stops += run.num_ended_by(STOPPED)
        compared += run.num_compared()
        assert run.differing(unbroken) == [], f"{plan}, killed at {steps}"
        unequal += [(steps, name) for name in run.unequal(unbroken)]
    count(combinations=1, chains=len(chains), kills=kills, stops=stops)
    count(batches_compared=compared, unequal=len(unequal))
    assert unequal == [], plan


def test_the_design_has_every_pair_of_values() -> None:
    plans = [plan_of(row) for row in ROWS]
    for first in FACTORS:
        for second in FACTORS:
            met = {(plan[first], plan[second]) for plan in plans}
            assert len(met) == (2 if first == second else 4)


@pytest.mark.slow_cases("+++++++++++", "-++-+++---+", "--+-++-+++-")
@pytest.mark.parametrize("row", [ROWS[1], ROWS[4], ALL])
def test_a_run_that_is_killed_at_some_steps_ends_equal(runs, count, row) -> None:
    first = random.Random(row).randrange(1, STEPS - 12)
    check(runs, count, plan_of(row), [chain(first)])


@pytest.mark.slow
def test_a_run_that_is_killed_at_every_step_ends_equal(runs, count) -> None:
    plan = plan_of(ALL) | {"every": 1, "workers": 0, "asynchronous": False}
    check(runs, count, plan, [list(range(1, STEPS + 1))])


@pytest.mark.soak
@pytest.mark.parametrize("row", [*ROWS, ALL])
def test_a_run_that_is_killed_at_any_step_ends_equal(runs, count, row) -> None:
    check(runs, count, plan_of(row), [chain(first) for first in range(1, STEPS + 1)])


@pytest.mark.soak
@pytest.mark.parametrize("number", range(2 ** (len(FACTORS) - 1)))
def test_every_combination_ends_equal_after_three_kills(runs, count, number) -> None:
    bits = [number >> bit & 1 for bit in range(len(FACTORS) - 1)]
    row = "".join("-+"[bit] for bit in [*bits, sum(bits) % 2])  # the last one with either parity
    first = random.Random(number).randrange(1, STEPS - 4)
    check(runs, count, plan_of(row), [chain(first)])
