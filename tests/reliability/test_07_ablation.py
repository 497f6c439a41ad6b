"""Each entry of a checkpoint left out when it is loaded: the comparison of row 6 must notice."""

from __future__ import annotations

import shutil

import pytest

from modelzoo_trainer import checkpointing
from tests.reliability.runs import Run

KILLED = -9
# Augmented samples are drawn anew for each, and leave the generators of the process in a state
# that follows from the sample: then a lost state of them would not be noticed.
PLAN = {"accumulate": 3, "steps": 16, "samples": 34, "augment": False}
AT_A_BOUNDARY = {"die_at": 10}  # a validation is due there
# In the middle of a window of accumulation, and of a pass.
WITHIN_A_STEP = {"save_after_batch": 20, "every": 0}

ENTRIES = [
    *("model", "model/norm.running_mean", "model/hidden.weight"),
    *("optimizer", "optimizer/state", "schedulers", "global_step", "dataloader"),
    *("dataloader/batch_idx", "dataloader/epoch", "dataloader/num_batches", "schedule"),
    *("rng", "rng/host/python", "rng/host/numpy", "rng/host/torch"),
    *("callbacks", "callbacks/Ema", "callbacks/JsonlLogger"),
]
WITHIN = ["grad_accum", "loss_accum"]
# What is derived from elsewhere when it is missing: nothing is lost with it.
SPARE = {"callbacks/JsonlLogger"}


def stopped(runs, stop: dict) -> Run:
    """Return a run that was killed."""
    run = runs.new(**PLAN)
    assert run.once(**stop).code == KILLED
    return run


def resumed(runs, killed: Run, drop: str | None) -> Run:
    """Return a copy of a run, resumed from a checkpoint that lacks an entry."""
    run = runs.new(**PLAN)
    shutil.copytree(killed.place, run.place, symlinks=True, dirs_exist_ok=True)
    run.once(drop=drop)
    return run


def is_noticed(run: Run, unbroken: Run) -> bool:
    return run.ends[-1].code != 0 or run.result != unbroken.result


@pytest.mark.slow
@pytest.mark.parametrize("stop", [AT_A_BOUNDARY, WITHIN_A_STEP], ids=["boundary", "within"])
def test_nothing_is_noticed_if_nothing_is_left_out(runs, stop) -> None:
    run = resumed(runs, stopped(runs, stop), None)
    assert run.ends[-1].code == 0, runs.nursery.said()[-3000:]
    assert run.result == runs.unbroken(**PLAN).result


@pytest.mark.slow
def test_every_entry_that_is_left_out_is_noticed(runs, count) -> None:
    unbroken = runs.unbroken(**PLAN)
    run = stopped(runs, AT_A_BOUNDARY)
    unnoticed = [entry for entry in ENTRIES if not is_noticed(resumed(runs, run, entry), unbroken)]
    count(left_out=len(ENTRIES), noticed=len(ENTRIES) - len(unnoticed), spare=len(SPARE))
    assert set(unnoticed) <= SPARE


def test_every_entry_of_a_window_that_is_left_out_is_noticed(runs, count) -> None:
    unbroken = runs.unbroken(**PLAN)
    run = stopped(runs, WITHIN_A_STEP)
    for entry in WITHIN:
        assert is_noticed(resumed(runs, run, entry), unbroken), entry
    count(left_out=len(WITHIN), noticed=len(WITHIN))


@pytest.mark.slow
def test_all_entries_of_a_checkpoint_are_tried(runs) -> None:
    known = set()
    for stop in (AT_A_BOUNDARY, WITHIN_A_STEP):
        path = checkpointing.list_checkpoints(stopped(runs, stop).folder)[-1].path
        known |= checkpointing.load(path).keys()
    tried = {entry.split("/")[0] for entry in [*ENTRIES, *WITHIN]}
    assert known == tried
