"""Runs with each callback and logger that has state, killed at step k and resumed: equal."""

from __future__ import annotations

import shutil
import warnings

import pytest

from modelzoo_trainer import callbacks, checkpointing, loggers
from tests.reliability.callback_runs import (
    BAD_STEP,
    GROUPS,
    STORE,
    CallbackPlan,
    CallbackRun,
    CallbackRuns,
)

KILLED, FAILED = -9, 1
STEPS = 24
FAST = ["together", "going_back", "early", "not_finite", "spikes", "flops"]
LAST = {"early": 15, "not_finite": BAD_STEP}  # of those that end before all steps
PLANS = {
    "plain": {},
    "windows": {"accumulate": 3, "every": 4},
    "asynchronous": {"accumulate": 3, "every": 2, "asynchronous": True},
}
KILLS = {"together": [6, 10, 19], "going_back": [9, 13, 20], "early": [6, 10, 15]}
KILLS |= {"not_finite": [3, 9, 13], "spikes": [9, 13, 20], "flops": [2, 11, 23]}

# Its state is about files that each process names anew: tests/loggers/test_resumed_values.py.
TRIED_ELSEWHERE = {"TensorBoardLogger"}
# What is found otherwise if it is missing: nothing is lost with it but time.
SPARE = {"JsonlLogger", "CSVLogger", "FlopUtilization"}
NOTHING_YET = {"ExtraCheckpoint_2", "SelectiveGrad"}  # which would choose the same weights


@pytest.fixture(scope="module")
def known_runs() -> dict:
    return {}


@pytest.fixture
def runs(nursery, tmp_path, known_runs) -> CallbackRuns:
    return CallbackRuns(nursery, tmp_path, known_runs)


def shipped() -> dict[str, type]:
    found = {name: getattr(callbacks, name) for name in callbacks.__all__}
    found |= {name: getattr(loggers, name) for name in loggers.__all__}
    return {name: value for name, value in found.items() if isinstance(value, type)}


def finished(run: CallbackRun, **changes) -> list[int]:
    """Run it until it ends in order or is killed, and return the exit codes.

    `SpikeDetection` ends a run with an error; the next one leaves the batches out.
    """
    codes = [run.once(**changes).code]
    if codes[0] == FAILED:
        codes.append(run.once(**changes).code)
    return codes


def unbroken(runs: CallbackRuns, plan: dict) -> CallbackRun:
    name = repr(plan)
    if name not in runs._unbroken:
        run = runs.new(**plan)
        codes = finished(run)
        expected = [FAILED, 0] if plan["group"] == "spikes" else [0]
        assert codes == expected, runs.nursery.said()[-3000:]
        runs._unbroken[name] = run
    return runs._unbroken[name]


def chained(runs: CallbackRuns, plan: dict, kills: list[int]) -> tuple[CallbackRun, int]:
    """Return a run that was killed at these steps and then went on, and how often it failed."""
    run = runs.new(**plan)
    codes = []
    for step in kills:
        codes += finished(run, die_at=step)
        assert codes[-1] == KILLED, (step, runs.nursery.said()[-3000:])
    codes += finished(run)
    assert codes[-1] == 0, runs.nursery.said()[-3000:]
    return run, codes.count(FAILED)


def check(runs: CallbackRuns, count, plan: dict, kills: list[int]) -> None:
    expected = unbroken(runs, plan)
    run, num_failed = chained(runs, plan, kills)
    unequal = names_of_unequal(run, expected)
    strange = run.said ^ expected.said
    count(chains=1, kills=len(kills), batches_compared=run.num_compared())
    count(compared=len(expected.result), unequal=len(unequal) + len(strange))
    assert unequal == [], (plan, kills)
    assert strange == set(), (plan, kills)
    assert num_failed == (plan["group"] == "spikes")


def names_of_unequal(run: CallbackRun, expected: CallbackRun) -> list[str]:
    found, wanted = run.result, expected.result
    return [name for name in wanted.keys() | found.keys() if found.get(name) != wanted.get(name)]


def test_all_that_have_state_are_here(tmp_path) -> None:
    tried = {
        name
        for group in GROUPS
        for one in GROUPS[group](CallbackPlan(folder="run", beside=str(tmp_path), group=group))
        for name in [cls.__name__ for cls in type(one).__mro__]
    }
    has_state = {name for name, cls in shipped().items() if hasattr(cls, "state_dict")}
    assert has_state - tried == TRIED_ELSEWHERE


# CI: each group that changes the course of a run.
@pytest.mark.slow
@pytest.mark.soak_cases("flops")
@pytest.mark.parametrize(
    "group",
    [
        *("together", "early", "not_finite", "spikes"),
        *(pytest.param(group, marks=pytest.mark.slow) for group in ("going_back", "flops")),
    ],
)
def test_a_run_that_is_killed_three_times_ends_equal(runs, count, group) -> None:
    plan = {"group": group} | ({"every": 4} if group == "together" else {})
    check(runs, count, plan, KILLS[group])


# CI: windows with the group of most callbacks, and with those that go back; the other way to save
# with the first.
@pytest.mark.soak_cases(
    "*-asynchronous", "early-*", "not_finite-*", "flops-*", "!together-asynchronous"
)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["windows", "asynchronous"])
@pytest.mark.parametrize("group", FAST)
def test_with_windows_and_rare_checkpoints_it_ends_equal_as_well(runs, count, group, name) -> None:
    plan = {"group": group} | PLANS[name]
    first = 2 * plan["every"]  # before its first checkpoint a run would begin anew
    check(runs, count, plan, chain(group, first + 1))


# CI: each group at one of the two batches.
@pytest.mark.soak_cases("going_back-40", "not_finite-31")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "batch"),
    [
        *((group, 31) for group in ("going_back", "not_finite", "spikes")),
        *((group, 40) for group in ("going_back", "not_finite")),  # the next batch is the bad one
    ],
)
def test_a_run_that_is_killed_within_a_step_ends_equal(runs, count, group, batch) -> None:
    plan = {"group": group, "accumulate": 3, "every": 4}
    expected = unbroken(runs, plan)
    run = runs.new(**plan)
    assert finished(run, save_after_batch=batch) == [KILLED]
    finished(run)
    other = {name for name in names_of_unequal(run, expected) if "checkpoint_" not in name}
    assert other == set()
    assert run.said == expected.said
    count(chains=1, kills=1)


@pytest.mark.soak
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("group", FAST)
def test_a_run_that_is_killed_at_any_step_ends_equal(runs, count, group, name) -> None:
    plan = {"group": group} | PLANS[name]
    # Not before there is a checkpoint: one that is written meanwhile is there with the second.
    first = 2 * plan.get("every", 1) - (not plan.get("asynchronous"))
    for step in range(first, LAST.get(group, STEPS)):
        check(runs, count, plan, chain(group, step))


def chain(group: str, first: int) -> list[int]:
    """Return up to three steps, the first one given, if the run has as many left."""
    last = LAST.get(group, STEPS) - (group == "not_finite")
    return list(range(first, last + 1, max(1, (last - first) // 2)))[:3]


# ---- a run that a callback has ended


@pytest.mark.slow_cases("early")
@pytest.mark.parametrize("group", LAST)
def test_a_run_that_was_ended_ends_again_at_once(runs, count, group) -> None:
    expected = unbroken(runs, {"group": group})
    run = copied(runs, expected)
    assert finished(run) == [0]
    assert run.attempts[-1].batches == {}
    same = ("step", "weights", "optimizer", "schedulers", "metrics.jsonl")
    assert {name: run.result[name] for name in same} == {n: expected.result[n] for n in same}
    assert expected.result["step"] == LAST[group]
    count(ended_again=1)


def copied(runs: CallbackRuns, run: CallbackRun, **changes) -> CallbackRun:
    """Return a copy of a run that goes on from where that one is."""
    made = runs.new(**run.changes | changes)
    shutil.copytree(run.place, made.place, symlinks=True, dirs_exist_ok=True)
    made._read_to = run._read_to
    return made


# ---- the comparison notices


# CI: the group of most callbacks, and those that go back.
@pytest.mark.soak_cases("early", "not_finite", "flops")
@pytest.mark.slow
@pytest.mark.parametrize("group", FAST)
def test_a_state_that_is_left_out_is_noticed(runs, count, group) -> None:
    plan = {"group": group} | ({"every": 4} if group == "together" else {})
    expected = unbroken(runs, plan)
    killed = runs.new(**plan)
    if group in LAST:
        assert finished(killed) == [0]  # it has to stay where it is
    else:
        assert finished(killed, die_at=10) == [KILLED]
    unnoticed = set()
    names = keys_of(killed)
    for name in names:
        run = copied(runs, killed)
        codes = finished(run, drop=f"callbacks/{name}")
        if codes[-1] == 0 and not names_of_unequal(run, expected) and run.said == expected.said:
            unnoticed.add(name)
    count(left_out=len(names), noticed=len(names) - len(unnoticed), spare=len(unnoticed))
    assert unnoticed <= SPARE | NOTHING_YET


def keys_of(run: CallbackRun) -> list[str]:
    newest = checkpointing.list_checkpoints(run.folder)[-1].path
    return list(checkpointing.load(newest)["callbacks"])


# ---- loggers that send


@pytest.mark.slow
def test_mlflow_has_each_step_of_a_killed_run_once(runs, monkeypatch, count) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with warnings.catch_warnings(action="ignore"):  # of its own imports
        pytest.importorskip("mlflow")
    plan = {"group": "mlflow"}
    expected = unbroken(runs, plan)
    run, _ = chained(runs, plan, [6, 12, 19])
    assert names_of_unequal(run, expected) == []
    points, all_points = points_of(run), points_of(expected)
    assert sorted(all_points) == list(range(1, STEPS + 1))
    assert points.items() <= all_points.items()
    assert set(range(20, STEPS + 1)) <= points.keys()  # what was sent before a kill may be lost
    count(chains=1, kills=3)


def points_of(run: CallbackRun) -> dict[int, float]:
    """Return the losses by step, of the only run in the store, each of which is there once."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run.place / STORE).as_uri())
    (found,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    points = client.get_metric_history(found.info.run_id, "loss")
    assert len({point.step for point in points}) == len(points)
    return {point.step: point.value for point in points}


@pytest.mark.slow
def test_wandb_is_sent_each_step_of_a_killed_run_once(runs, count) -> None:
    pytest.importorskip("wandb")
    from tests.loggers.test_wandb_logger import ids_of, steps_of

    plan = {"group": "wandb"}
    expected = unbroken(runs, plan)
    kills = [6, 12, 19]
    run, _ = chained(runs, plan, kills)
    assert names_of_unequal(run, expected) == []
    assert steps_of(expected.folder) == list(range(1, STEPS + 1))
    steps = steps_of(run.folder, num_killed=len(kills))
    assert len(set(steps)) == len(steps)
    assert set(range(20, STEPS + 1)) <= set(steps)
    assert len(ids_of(run.folder, num_killed=len(kills))) == 1
    assert all(ended.orphans == 0 for ended in run.ends)
    count(chains=1, kills=3)
