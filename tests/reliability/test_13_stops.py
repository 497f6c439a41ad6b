"""SIGTERM, SIGUSR1 and SIGINT at random instants, in every phase of a run; twice; during a save."""

from __future__ import annotations

import random
import signal
import time

import pytest

from modelzoo_trainer import checkpointing
from tests.reliability.runs import Run, instants
from tests.reliability.states import visible

pytestmark = pytest.mark.slow

CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGINT: 130}
SOONEST_S = 0.01  # until then the process may not have come to the command line
# Where most of a run's time is spent, and so where most of the signals come.
PHASES = {
    "step": ["init.callbacks[tests.reliability.parts.Slow].phase=step"],
    "validation": [
        "init.callbacks[tests.reliability.parts.Slow].phase=validation",
        "init.loop.eval_frequency=1",
    ],
    "save": ["init.callbacks[tests.reliability.parts.Slow].phase=save", "init.checkpoint.steps=1"],
    "asynchronous_save": [
        "init.model={tests.reliability.toy_task.Net: {pad: 1000000}}",
        "init.checkpoint={steps: 1, asynchronous: true}",
        "init.callbacks[KeepNCheckpoints].n=2",
    ],
    "data": ["fit.train_dataloader.slow=true"],
    "worker": ["fit.train_dataloader.slow=true", "fit.train_dataloader.num_workers=2"],
    "start_up": ["init.loop.max_steps=1"],
}


class Stopped:
    """A run that gets a signal, and what it left.

    Args:
        run: The run, before its first process.
        after_s: When it gets the signal.
        number: The signal.
        times: How often.
    """

    def __init__(self, run: Run, after_s: float, number: int, times: int = 1) -> None:
        self.run = run
        self.number = number
        child = run.start()
        self.was_in_time = not child.has_ended(after_s)
        for repetition in range(times if self.was_in_time else 0):
            if repetition and child.has_ended(0.005):
                break
            child.send(number)
        begin = time.monotonic()
        self.ended = run.end(child.wait())
        self.latency_ms = round(1000 * (time.monotonic() - begin))

    def check(self, code: int) -> None:
        """Check the exit code, and that the newest checkpoint is of the step that was reached."""
        run = self.run
        said = run.nursery.said()[-3000:]
        is_over = run.attempts[-1].stopped is not None
        # What comes when all is done may find a process that is on its way out; what comes on a
        # busy machine before anything is done, one that has not come to the command line.
        is_unborn = not run.folder.exists()
        codes = (code, 0, -self.number) if is_over else (code, -self.number)[: 1 + is_unborn]
        assert self.ended.code in codes, said
        assert self.ended.orphans == 0
        newest = visible(run.folder)[-1:] if run.folder.exists() else []
        step = checkpointing.read_manifest(newest[0]).step if newest else 0
        assert step == run.num_batches, said
        if newest:
            assert checkpointing.verify(newest[0]) == []


def stopped_runs(runs, phase: str, number: int, times: int, *, sent: int) -> list[Stopped]:
    """Return runs that were stopped at random instants, from their first on."""
    changes = PHASES[phase]
    longest_s = runs.unbroken(params=changes).seconds
    generator = random.Random(f"{phase} {number}")
    made = []
    while len(made) < times or not any(stopped.was_in_time for stopped in made):
        run = runs.new(params=changes)
        made.append(Stopped(run, generator.uniform(SOONEST_S, longest_s), number, sent))
        made[-1].check(CODES[signal.Signals(number)])
        if not made[-1].was_in_time:  # the machine was slower when it was measured
            longest_s = min(longest_s, made[-1].ended.seconds)
    return made


def note(count, made: list[Stopped]) -> None:
    in_time = [stopped for stopped in made if stopped.was_in_time]
    count(signals=len(in_time), longest_ms=max(stopped.latency_ms for stopped in in_time))


@pytest.mark.slow_cases(
    "2-asynchronous_save", "2-data", "2-start_up", "2-validation", "2-save", "2-worker"
)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("times", [2, pytest.param(25, marks=pytest.mark.soak)])
def test_a_stop_at_a_random_instant_leaves_a_checkpoint_of_that_step_and_says_so(
    runs, count, phase, times
) -> None:
    note(count, stopped_runs(runs, phase, signal.SIGTERM, times, sent=1))


@pytest.mark.soak
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_other_signals_leave_a_checkpoint_of_that_step_as_well(runs, count, phase, number) -> None:
    note(count, stopped_runs(runs, phase, number, 15, sent=1))


@pytest.mark.parametrize("phase", ["save", "asynchronous_save"])
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_a_second_sigterm_changes_nothing(runs, count, phase, times) -> None:
    note(count, stopped_runs(runs, phase, signal.SIGTERM, times, sent=3))


def test_a_second_ctrl_c_ends_a_run_at_once_and_what_was_saved_stays(runs, count) -> None:
    run = runs.new(params=[*PHASES["data"], "init.loop.max_steps=100000"])
    child = run.start()
    run.wait_for(child, "batch")
    child.has_ended(0.05)
    child.send(signal.SIGINT)
    child.has_ended(0.002)
    child.send(signal.SIGINT)
    assert run.end(child.wait()).code == 130
    assert all(checkpointing.verify(path) == [] for path in visible(run.folder))
    count(signals=2)


@pytest.mark.slow_cases("1-10", "1-15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("times", [1, pytest.param(12, marks=pytest.mark.soak)])
def test_a_run_that_is_stopped_again_and_again_ends_as_if_it_had_not_been(
    runs, count, number, times
) -> None:
    plan = {"slow": "step", "accumulate": 3, "asynchronous": True}
    unbroken = runs.unbroken(**plan)
    signals = 0
    for trial in range(times):
        run = runs.new(**plan)
        for after_s in instants(f"again {number} {trial}", unbroken.seconds / 2):
            # Its handlers are there from the start of the fit on.
            code = run.killed_after(0.05 + after_s, number).code
            assert code in (0, 143, -number)
            if code == 0:
                break
            signals += 1
        assert run.differing(unbroken) == []
        assert run.result == unbroken.result
    count(signals=signals)


def test_a_stop_file_ends_a_run_like_a_preemption(runs, count) -> None:
    run = runs.new(slow="step", steps=100_000, keep=3)
    child = run.start()
    run.wait_for(child, "batch")
    child.has_ended(0.05)
    (run.folder / "stop").touch()
    assert run.end(child.wait()).code == 143
    assert not (run.folder / "stop").exists()
    assert checkpointing.list_checkpoints(run.folder)[-1].step == run.num_batches
    count(stop_files=1)
