import io
import itertools
import logging
import re
import sys
import time
from contextlib import contextmanager
from functools import partial

import pytest

from modelzoo_trainer import Callback, Checkpoint, ConfigError, RollBack, TrainingLoop
from modelzoo_trainer.callbacks import (
    ExtraCheckpoint,
    LogOptimizerParamGroup,
    ModelEvalMetrics,
    RateProfiler,
    SaveBest,
)
from modelzoo_trainer.core.parts.results_log import number
from modelzoo_trainer.loggers import ProgressLogger, progress
from modelzoo_trainer.loggers.console import display
from modelzoo_trainer.loggers.console.bar import duration
from modelzoo_trainer.loggers.console.pace import Pace

LINE = re.compile(
    r"train step (\d+)/4 \| epoch 1 \| loss \d\.\d{5} \| lr 0\.1 "
    r"(\| \S+ (steps/s|s/step) )?\| 0:00:00 elapsed, (0:00:00 left|estimating)"
)


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    """A clock on which hardly any time goes by, however busy the machine is."""
    looks = itertools.count()
    monkeypatch.setattr(display.time, "perf_counter", lambda: next(looks) * 1e-4)


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO, logger="modelzoo_trainer")
    return lambda: [r.getMessage() for r in caplog.records if r.name.endswith("progress")]


def steps_of(lines):
    return [line.split()[2] for line in lines if line.startswith("train step")]


@pytest.fixture
def figures():
    return [LogOptimizerParamGroup("lr"), ModelEvalMetrics(), RateProfiler()]


def test_a_fit_has_a_start_a_line_and_an_end(make, batches, messages, figures):
    make(ProgressLogger(), callbacks=figures).fit(batches)
    start, line, end = messages()
    assert start.startswith("Training Net (45 parameters) on cpu, float32\n")
    assert LINE.fullmatch(line)[1] == "1"
    assert end.startswith("Finished at step 4: 4 steps in ")


def test_every_logged_step_has_a_line_if_asked_for(make, batches, messages):
    make(ProgressLogger(interval_s=0.0), log_steps=3).fit(batches)
    assert steps_of(messages()) == ["3/4", "4/4"]


def test_short_epochs_have_no_lines_of_their_own(make, batches, messages):
    make(ProgressLogger(), loop=TrainingLoop(num_epochs=3)).fit(batches)
    assert steps_of(messages()) == ["1/30"]


def test_a_run_of_unknown_length_has_no_time_left(make, batches, messages):
    trainer = make(ProgressLogger(), loop=TrainingLoop(num_epochs=1))
    trainer.fit(lambda: iter(batches))
    assert "number per epoch unknown" in messages()[0]
    assert steps_of(messages()) == ["1"]
    assert not any("left" in line for line in messages())


def test_a_validation_has_a_line(make, batches, messages, figures):
    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    make(ProgressLogger(), callbacks=figures, loop=loop).fit(batches, batches[:2])
    found = [line for line in messages() if line.startswith("validate_0:")]
    assert len(found) == 2
    assert re.fullmatch(r"validate_0: loss \d\.\d{5}, accuracy \d\.\d{5} at step 2", found[0])


def test_a_validation_alone_has_a_line(make, batches, messages):
    make(ProgressLogger()).validate(batches[:2])
    assert re.fullmatch(r"validate_0: loss \d\.\d{5} at step 0", messages()[0])


def test_the_end_shows_last_and_best(make, batches, messages):
    trainer = make(ProgressLogger(), loop=TrainingLoop(max_steps=6, eval_frequency=2))
    result = trainer.fit(batches, batches[:1])
    rows = [line.split() for line in messages()[-1].splitlines()]
    best = result.best["validate_0/loss"]
    last = result.metrics["validate_0/loss"]
    assert ["validate_0/loss", number(last), number(best.value), str(best.step)] in rows
    assert ["loss", number(result.metrics["loss"])] in rows


def test_a_failed_run_shows_how_far_it_came(make, batches, messages):
    class Fail(Callback):
        def on_step_boundary(self, trainer):
            if trainer.global_step == 3:
                raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        make(ProgressLogger(), callbacks=[Fail()]).fit(batches)
    assert steps_of(messages()) == ["1/4", "3/4"]
    assert not any(line.startswith("Finished") for line in messages())


class Slow(Callback):
    """Gives the thread that draws the time to see each step."""

    def on_step_boundary(self, trainer):
        time.sleep(0.25)


class GoBack(Callback):
    """Goes back to the last checkpoint, once."""

    def __init__(self, step):
        self.step = step

    def on_step_boundary(self, trainer):
        if trainer.global_step == self.step:
            self.step = None
            found = RuntimeError("nowhere to go back to")
            raise RollBack("bad", step=trainer.global_step, batches=[], cause=found)


def going_back():
    return {
        "callbacks": [GoBack(5)],
        "checkpoint": Checkpoint(steps=3),
        "loop": TrainingLoop(max_steps=6, eval_frequency=2),
    }


def test_a_run_that_goes_back_goes_on_from_there(make, batches, messages):
    make(ProgressLogger(interval_s=0.0), **going_back()).fit(batches, batches[:1])
    assert steps_of(messages()) == ["1/6", "2/6", "3/6", "4/6", "5/6", "4/6", "5/6", "6/6"]


def test_a_run_that_resumes_counts_from_there(make, batches, messages):
    make(checkpoint=Checkpoint(steps=2), max_steps=2).fit(batches)
    make(ProgressLogger(interval_s=0.0), max_steps=4).fit(batches)
    assert steps_of(messages())[-2:] == ["3/4", "4/4"]
    assert messages()[-1].startswith("Finished at step 4: 2 steps in")
    start = next(line for line in messages() if "resumed" in line)
    assert "resumed from checkpoint_2 at step 2" in start
    assert re.search(r"length: +to step 4, 2 steps left\n", start)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@contextmanager
def on_terminal(monkeypatch):
    """Make standard error a terminal, with a handler of the program's own."""
    stream = Terminal()
    handler = logging.StreamHandler(stream)
    package = logging.getLogger("modelzoo_trainer")
    package.addHandler(handler)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        yield stream
    package.removeHandler(handler)


def shown(stream):
    """What a terminal would show: of each line what stands after its last carriage return."""
    lines = stream.getvalue().split("\n")
    return [[part for part in line.split("\r") if part.strip()][-1:] for line in lines]


def test_a_terminal_has_a_bar_and_messages_on_lines_of_their_own(make, batches, monkeypatch):
    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    trainer = make(ProgressLogger(interval_s=0.0), loop=loop)
    with on_terminal(monkeypatch) as terminal:
        trainer.fit(batches, batches[:2])
    assert "4/4" in terminal.getvalue()
    assert "train step" not in terminal.getvalue()
    results = [line[0] for line in shown(terminal) if line and "validate_0: " in line[0]]
    assert len(results) == 2
    assert all(line.startswith("validate_0: loss") for line in results)
    assert sum("Finished" in line[0] for line in shown(terminal) if line) == 1


def test_the_bar_leaves_the_handlers_as_they_were_even_after_a_failure(make, batches, monkeypatch):
    class Fail(Callback):
        def on_step_boundary(self, trainer):
            raise RuntimeError("stop")

    trainer = make(ProgressLogger(), callbacks=[Fail()])
    with on_terminal(monkeypatch) as terminal:
        before = list(logging.getLogger("modelzoo_trainer").handlers)
        with pytest.raises(RuntimeError):
            trainer.fit(batches)
        assert logging.getLogger("modelzoo_trainer").handlers == before
    assert "train" in terminal.getvalue()


@pytest.mark.slow
def test_the_bar_goes_back_with_the_run(make, batches, monkeypatch):
    settings = going_back()
    settings["callbacks"].insert(0, Slow())
    trainer = make(ProgressLogger(interval_s=0.0), **settings)
    with on_terminal(monkeypatch) as terminal:
        trainer.fit(batches, batches[:1])
    shown_steps = [int(step) for step in re.findall(r"(\d)/6", terminal.getvalue())]
    assert min(shown_steps[shown_steps.index(5) :]) < 5
    assert shown_steps[-1] == 6


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00:00"), (67, "0:01:07"), (36061, "10:01:01")]
)
def test_times_are_hours_minutes_seconds(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.314318, "2.31432"), (0.0, "0.00000"), (1.23456e-5, "1.2346e-05"), (7, "7"), (1e7, "1e+07")],
)
def test_numbers_have_five_decimals_or_digits(value, text):
    assert number(value) == text


def test_a_negative_interval_is_refused():
    with pytest.raises(ConfigError, match=r"interval_s: expected .*>= 0.*, got -1"):
        ProgressLogger(interval_s=-1)


def test_the_end_says_what_its_numbers_count(make, batches, messages, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    make(ProgressLogger(), max_steps=6, checkpoint=Checkpoint(steps=1)).fit(batches)
    start, *_, end = messages()
    assert re.search(r"folder: +run\n?", start)
    assert re.search(r"checkpoints: 6 written by this fit in run, the last is checkpoint_6", end)
    assert re.search(r"throughput: +\S+ (steps/s|s/step), .* samples/s while training", end)


def test_the_end_counts_completed_epochs(make, batches, messages):
    make(ProgressLogger(), max_steps=25).fit(batches)
    assert "step 25, 2 epochs completed" in messages()[-1]


@pytest.mark.parametrize(
    "beside",
    [SaveBest("validate_0/loss"), ExtraCheckpoint(steps=2, checkpoint_name="extra_{step}")],
    ids=lambda callback: type(callback).__name__,
)
def test_a_checkpoint_beside_the_runs_own_does_not_stop_the_clock(
    make, batches, messages, monkeypatch, beside
):
    now = 0.0

    class Slow(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            nonlocal now
            now += 0.01

        def saving_end(self):
            nonlocal now
            now += 1.0

    monkeypatch.setattr(progress, "Pace", partial(Pace, clock=lambda: now))
    loop = TrainingLoop(max_steps=12, eval_frequency=4)
    make(ProgressLogger(), Slow(), beside, loop=loop).fit(batches, batches[:1])
    assert re.search(r"throughput: +100 steps/s", messages()[-1])


def test_the_epoch_is_that_of_the_last_step(make, batches):
    progress, seen = ProgressLogger(), []

    class Watch(Callback):
        def note(self, trainer):
            seen.append((trainer.global_step, progress._look().epoch))

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            self.note(trainer)

        def on_validate_start(self, trainer, model, val_dataloader, loop):
            self.note(trainer)

        def on_train_epoch_start(self, trainer, epoch):
            self.note(trainer)

    loop = TrainingLoop(num_epochs=2, eval_frequency=2)
    make(progress, callbacks=[Watch()], loop=loop).fit(batches[:2], batches[:1])
    first, second = "epoch 1/2", "epoch 2/2"
    assert seen == [
        *[(0, first), (1, first), (2, first), (2, first)],  # the validation after epoch 1
        *[(2, first), (3, second), (4, second), (4, second)],
    ]
