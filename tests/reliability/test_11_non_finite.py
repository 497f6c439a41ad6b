"""A loss that is infinite at some batches: what each policy of CheckLoss leaves behind."""

from __future__ import annotations

import pytest
import torch

from modelzoo_trainer import checkpointing
from tests.reliability.runs import Run

STEP = 14
BAD = [(0, STEP - 1), (1, 4)]
PLAN = {"steps": 24, "bad_batches": BAD}
FAILED = 1


def newest(run: Run):
    return checkpointing.list_checkpoints(run.folder)[-1]


def is_finite(run: Run) -> bool:
    state = checkpointing.load(newest(run).path)
    return all(bool(torch.isfinite(value).all()) for value in state["model"].values())


def test_a_loss_that_is_not_finite_ends_the_run_and_the_last_good_checkpoint_stays(
    runs, count
) -> None:
    run = runs.new(**PLAN, policy="raise")
    assert run.once().code == FAILED
    assert newest(run).step == STEP - 1
    assert is_finite(run)
    said = runs.nursery.said()
    assert f"global_step {STEP}" in said
    count(trials=1)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_run_goes_past_losses_that_are_not_finite(runs, count, policy, accumulate) -> None:
    run = runs.new(**PLAN, policy=policy, accumulate=accumulate)
    assert run.once().code == 0, runs.nursery.said()[-3000:]
    assert newest(run).step == PLAN["steps"]
    assert is_finite(run)
    count(trials=1)


@pytest.mark.slow_cases("12-rollback", "14-*", "15-*")
@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize(
    "step", [12, 14, 15, *(pytest.param(k, marks=pytest.mark.soak) for k in (1, 13, 16, 20, 23))]
)
def test_a_run_that_is_killed_around_such_a_step_ends_equal(runs, count, policy, step) -> None:
    plan = PLAN | {"policy": policy}
    run = runs.new(**plan)
    run.once(die_at=step)
    assert run.once().code == 0
    assert run.result == runs.unbroken(**plan).result
    count(trials=1, kills=1)
