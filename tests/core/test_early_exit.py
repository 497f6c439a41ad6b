"""Runs that end before their time: on request, on a condition, by a signal."""

from __future__ import annotations

import inspect
import math
import re
import signal
import time
from typing import Any

import pytest

from modelzoo_trainer import Callback, Checkpoint, ConfigError, StopTraining, TrainingLoop
from tests.doubles import Recorder, tiny_batches


class Stopping(Callback):
    """Asks for the end in a hook, at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.early_exit.stop("enough")


class Signalling(Callback):
    """Raises signals at a batch, and notes what `on_interrupt` is told."""

    def __init__(self, *numbers: signal.Signals, batch_idx: int = 1) -> None:
        self.numbers = numbers
        self.batch_idx = batch_idx
        self.told = []

    def on_train_step_start(self, trainer, model, batch):
        if trainer.data.batch_idx == self.batch_idx:
            for number in self.numbers:
                signal.raise_signal(number)

    def on_interrupt(self, trainer, reason):
        self.told.append((reason, trainer.global_step))


def test_a_run_that_is_stopped_ends_at_the_boundary_with_its_end_hooks(trainer_of) -> None:
    recorder = Recorder()
    trainer = trainer_of(Stopping(2), recorder)
    trainer.fit(tiny_batches(5), tiny_batches(1))
    assert trainer.global_step == 2
    assert trainer.early_exit.reason == "enough"
    assert recorder.names[-3:] == ["on_train_end", "on_fit_end", "on_fit_committed"]


def test_a_stop_outside_a_run_is_warned_of(trainer_of, caplog) -> None:
    trainer = trainer_of()
    trainer.early_exit.stop("too soon")
    assert "'too soon'" in caplog.text
    assert "no fit or validation is running" in caplog.text
    trainer.fit(tiny_batches(5))
    trainer.early_exit.stop("too late")
    assert "'too late'" in caplog.text
    assert trainer.global_step == 5


def test_a_stop_in_a_run_is_not_warned_of(trainer_of, caplog) -> None:
    trainer_of(Stopping(2)).fit(tiny_batches(5))
    assert "has no effect" not in caplog.text


def test_a_stop_within_a_window_waits_for_the_optimizer(trainer_of) -> None:
    class Early(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            trainer.early_exit.stop("enough")

    recorder = Recorder()
    trainer = trainer_of(Early(), recorder, grad_accum_steps=3)
    trainer.fit(tiny_batches(6))
    assert trainer.global_step == 1
    assert recorder.count("on_train_batch_end") == 3


def test_the_final_checkpoint_is_written_when_a_run_is_stopped(trainer_of) -> None:
    trainer = trainer_of(Stopping(2), checkpoint=Checkpoint(steps=100))
    trainer.fit(tiny_batches(5))
    assert (trainer.model_dir / "checkpoint_2").exists()


def test_the_next_run_starts_unasked(trainer_of) -> None:
    trainer = trainer_of(Stopping(2))
    trainer.fit(tiny_batches(5))
    trainer.fit(tiny_batches(5))
    assert trainer.global_step == 7
    assert (trainer.early_exit.should_exit, trainer.early_exit.reason) == (False, "")


def test_a_condition_is_asked_at_each_step(trainer_of) -> None:
    asked = []

    def enough(trainer, most):
        asked.append(trainer.global_step)
        return trainer.global_step >= most

    trainer = trainer_of(grad_accum_steps=2)
    trainer.early_exit.register(enough, trainer, most=2)
    trainer.fit(tiny_batches(9))
    assert asked == [1, 2]
    assert trainer.global_step == 2


def test_a_condition_stays_for_the_next_run_until_it_is_removed(trainer_of) -> None:
    trainer = trainer_of()
    handle = trainer.early_exit.register(lambda: True)
    trainer.fit(tiny_batches(3))
    trainer.fit(tiny_batches(3))
    assert trainer.global_step == 2
    handle.remove()
    handle.remove()
    trainer.fit(tiny_batches(3))
    assert trainer.global_step == 5


def test_a_condition_that_is_registered_during_a_run_is_asked(trainer_of) -> None:
    class Registering(Callback):
        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            trainer.early_exit.register(lambda: trainer.global_step >= 2)

    trainer = trainer_of(Registering())
    trainer.fit(tiny_batches(5))
    assert trainer.global_step == 2


def test_what_cannot_be_called_is_no_condition(trainer_of) -> None:
    with pytest.raises(TypeError, match=r"^early_exit.register got True"):
        trainer_of().early_exit.register(True)


def test_a_stop_during_a_validation_ends_it_and_the_run(trainer_of) -> None:
    class Stop(Callback):
        def on_validate_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.early_exit.stop("enough")

    recorder = Recorder()
    trainer = trainer_of(Stop(), recorder, eval_frequency=2)
    trainer.fit(tiny_batches(6), tiny_batches(3))
    assert trainer.global_step == 2
    assert recorder.count("on_validate_batch_end") == 1
    assert recorder.names[-2:] == ["on_fit_end", "on_fit_committed"]


def test_a_validation_alone_can_be_stopped(trainer_of) -> None:
    class Stop(Callback):
        def on_validate_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.early_exit.stop("enough")

    recorder = Recorder()
    trainer_of(Stop(), recorder).validate(tiny_batches(3))
    assert recorder.count("on_validate_batch_end") == 1
    assert recorder.count("on_validate_end") == 1


# ---- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_at_the_boundary(trainer_of, number) -> None:
    signalling, recorder = Signalling(number), Recorder()
    trainer = trainer_of(signalling, recorder)
    trainer.raise_on_interrupt = False
    trainer.fit(tiny_batches(5), tiny_batches(1))
    assert trainer.global_step == 1
    assert trainer.interrupted == number.name
    assert signalling.told == [(number.name, 1)]
    ends = [name for name in recorder.names if "checkpoint" not in name]
    assert ends[-4:] == ["on_interrupt", "on_train_end", "on_fit_end", "on_fit_committed"]


@pytest.mark.parametrize(
    ("number", "found"), [(signal.SIGINT, False), (signal.SIGTERM, True), (signal.SIGUSR1, True)]
)
def test_a_preempted_run_leaves_a_checkpoint_though_none_was_asked_for(
    trainer_of, number, found
) -> None:
    trainer = trainer_of(Signalling(number))
    trainer.raise_on_interrupt = False
    trainer.fit(tiny_batches(5))
    assert trainer.interrupted == number.name
    assert (trainer.model_dir / "checkpoint_1").exists() == found


def test_a_second_sigterm_changes_nothing(trainer_of) -> None:
    trainer = trainer_of(Signalling(signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1))
    with pytest.raises(SystemExit):
        trainer.fit(tiny_batches(5))
    assert (trainer.interrupted, trainer.global_step) == ("SIGTERM", 1)


def test_a_signal_while_a_fit_begins_ends_it_before_the_first_step(trainer_of) -> None:
    class Early(Callback):
        def on_enter_fit(self, trainer, stack, train_dataloader, val_dataloader, loop):
            signal.raise_signal(signal.SIGTERM)

    recorder = Recorder()
    trainer = trainer_of(Early(), recorder)
    with pytest.raises(SystemExit):
        trainer.fit(tiny_batches(5))
    assert (trainer.interrupted, trainer.global_step) == ("SIGTERM", 0)
    assert recorder.count("on_train_start") == 0
    assert recorder.count("on_fit_end") == 1


@pytest.mark.parametrize(
    ("number", "error", "code"),
    [(signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, SystemExit, 143)],
)
def test_a_signal_for_the_program_is_raised_when_the_fit_has_ended_in_order(
    trainer_of, number, error, code
) -> None:
    before = signal.getsignal(number)
    recorder = Recorder()
    trainer = trainer_of(Signalling(number), recorder, checkpoint=Checkpoint(steps=100))
    with pytest.raises(error) as raised:
        trainer.fit(tiny_batches(5))
    assert getattr(raised.value, "code", None) == code
    assert recorder.names[-2:] == ["on_fit_end", "on_fit_committed"]
    assert recorder.count("on_fit_exception") == recorder.count("on_train_exception") == 0
    assert (trainer.model_dir / "checkpoint_1").is_dir()
    assert signal.getsignal(number) == before
    assert not trainer.is_fitting


def test_a_sweep_does_not_go_on_after_ctrl_c(trainer_of, tmp_path) -> None:
    trained = []

    def sweep():
        for number in range(3):
            trainer = trainer_of(Signalling(signal.SIGINT), model_dir=tmp_path / str(number))
            trained.append(number)
            trainer.fit(tiny_batches(3))

    with pytest.raises(KeyboardInterrupt):
        sweep()
    assert trained == [0]


def test_ctrl_c_after_the_last_step_is_raised_as_well(trainer_of, caplog) -> None:
    class Late(Callback):
        def on_fit_end(self, trainer, loop):
            signal.raise_signal(signal.SIGINT)

    trainer = trainer_of(Late(), checkpoint=Checkpoint(steps=100))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(tiny_batches(2))
    assert (trainer.interrupted, trainer.late_signal) == (None, "SIGINT")
    assert "SIGINT arrived after the last step" in caplog.text
    assert (trainer.model_dir / "checkpoint_2").is_dir()


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_sweep_does_not_go_on_if_a_run_fails_as_it_ends(
    trainer_of, caplog, number, expected
) -> None:
    class Failing(Callback):
        def on_fit_end(self, trainer, loop):
            raise OSError("disk full")

    with pytest.raises(expected) as caught:
        trainer_of(Signalling(number), Failing()).fit(tiny_batches(3))
    assert isinstance(caught.value.__cause__, OSError)
    is_logged = "failed at global_step 1 after SIGTERM" in caplog.text
    assert is_logged is (number == signal.SIGTERM)  # Python prints no cause of a SystemExit
    with pytest.raises(OSError, match="disk full"):  # which no signal stopped
        trainer_of(Failing()).fit(tiny_batches(3))


def test_a_run_of_num_steps_that_sigterm_ends_late_trains_no_further(trainer_of, tmp_path) -> None:
    class Late(Callback):
        def on_validate_end(self, trainer, model, loop):
            signal.raise_signal(signal.SIGTERM)

    settings = {"num_steps": 4, "model_dir": tmp_path, "checkpoint": Checkpoint(steps=2)}
    with pytest.raises(SystemExit):
        trainer_of(Late(), **settings).fit(tiny_batches(4), tiny_batches(1))
    again = trainer_of(**settings)
    again.fit(tiny_batches(4), tiny_batches(1))
    assert again.global_step == 4
    more = trainer_of(**settings)
    more.fit(tiny_batches(4), tiny_batches(1))
    assert more.global_step == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_fit_returns_after_a_signal_where_that_is_asked_for(trainer_of, number) -> None:
    trainer = trainer_of(Signalling(number))
    trainer.raise_on_interrupt = False
    trainer.fit(tiny_batches(3))
    assert trainer.interrupted == number.name


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"checkpoint": Checkpoint(steps=100)}, "saved {folder}/checkpoint_1."),
        ({}, "nothing was saved .*checkpoint.steps"),
        (
            {"checkpoint": Checkpoint(save_initial_checkpoint=True)},
            "steps after {folder}/checkpoint_0 were not saved",
        ),
    ],
    ids=["saved", "not configured", "before"],
)
def test_one_warning_says_what_was_stopped_where_and_what_was_saved(
    trainer_of, caplog, settings, found
) -> None:
    trainer = trainer_of(Signalling(signal.SIGINT), **settings)
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT at global_step 1"):
        trainer.fit(tiny_batches(5))
    [line] = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert line.startswith("The run was stopped by SIGINT at global_step 1: ")
    assert re.search(found.format(folder=re.escape(str(trainer.model_dir))), line)


# ---- stop file, time limit, StopTraining


def test_a_stop_file_ends_the_run_and_is_removed(trainer_of) -> None:
    class Touch(Callback):
        def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
            (trainer.model_dir / "stop").touch()

    trainer = trainer_of(Touch())
    trainer.fit(tiny_batches(5))
    assert (trainer.interrupted, trainer.global_step) == ("stop file", 1)
    assert not (trainer.model_dir / "stop").exists()
    assert (trainer.model_dir / "checkpoint_1").exists()


@pytest.mark.parametrize("hook", ["on_validate_end", "on_after_save_checkpoint", "on_fit_end"])
def test_a_stop_file_that_comes_too_late_stops_no_later_run(trainer_of, caplog, hook) -> None:
    def touch(self, trainer, *rest):
        (trainer.model_dir / "stop").touch()

    touch.__signature__ = inspect.signature(getattr(Callback, hook))
    settings = {"max_steps": 2, "checkpoint": Checkpoint(steps=100)}
    trainer = trainer_of(type("Touch", (Callback,), {hook: touch})(), **settings)
    trainer.fit(tiny_batches(5), tiny_batches(1))
    assert (trainer.interrupted, trainer.global_step) == (None, 2)
    assert not (trainer.model_dir / "stop").exists()
    assert f"Removed {trainer.model_dir / 'stop'}: it was created too late" in caplog.text


def test_a_stop_file_beside_a_run_that_fails_stops_the_next_attempt(trainer_of) -> None:
    class Fail(Callback):
        def on_fit_end(self, trainer, loop):
            (trainer.model_dir / "stop").touch()
            raise RuntimeError("disk")

    trainer = trainer_of(Fail())
    with pytest.raises(RuntimeError, match="disk"):
        trainer.fit(tiny_batches(2))
    assert (trainer.model_dir / "stop").exists()


def test_a_run_whose_time_is_over_ends_at_the_boundary(trainer_of) -> None:
    trainer = trainer_of(max_time=1e-6)
    trainer.fit(tiny_batches(5))
    assert (trainer.interrupted, trainer.global_step) == ("max_time", 1)


def test_the_time_of_earlier_attempts_counts(trainer_of) -> None:
    trainer = trainer_of(max_time=3600)
    trainer.autorestart.supervise(
        is_restart=False, last_checkpoint=None, on_commit=print, began=time.monotonic() - 3601
    )
    trainer.fit(tiny_batches(5))
    assert (trainer.interrupted, trainer.global_step) == ("max_time", 1)


def test_a_time_that_no_step_fits_into_is_told(trainer_of, caplog) -> None:
    class Slow(Callback):
        def on_validate_start(self, trainer, model, val_dataloader, loop):
            interrupt = trainer.callbacks["interrupt"]
            interrupt._end = interrupt._next_look = 0.0

    for number in (1, 2):
        trainer = trainer_of(Slow(), max_time=3600, eval_frequency=2, max_steps=4)
        trainer.fit(tiny_batches(4), tiny_batches(2))
        assert (trainer.interrupted, trainer.global_step) == ("max_time", 2)
        assert ("loop.max_time" in caplog.text) is (number == 2)


def test_a_time_that_is_over_ends_a_validation_too(trainer_of) -> None:
    class Slow(Callback):
        def on_validate_start(self, trainer, model, val_dataloader, loop):
            trainer.callbacks["interrupt"]._end = trainer.callbacks["interrupt"]._next_look = 0.0

    recorder = Recorder()
    trainer = trainer_of(Slow(), recorder, max_time=3600)
    trainer.fit(tiny_batches(3), tiny_batches(4))
    assert trainer.interrupted == "max_time"
    assert recorder.count("on_validate_batch_end") == 1


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(90, 90), (0.5, 0.5), ("00:01:30", 90), ("1-02:00:05", 93605), (None, None)],
)
def test_a_time_limit_is_seconds_or_a_time(given, seconds) -> None:
    assert TrainingLoop(max_time=given).max_time_s == seconds


@pytest.mark.parametrize(
    "given", ["soon", "1:2:3", "00:60:00", 0, -1, True, math.inf, math.nan, 10**400, ""]
)
def test_what_is_no_time_is_refused(given) -> None:
    with pytest.raises(ConfigError, match=r"^loop\.max_time: .*, a number of seconds > 0 .*, got "):
        TrainingLoop(max_time=given)


def raising(name: str, at: int = 1) -> Any:
    """Return a callback that raises `StopTraining` in the n-th call of a hook."""
    left = [at]

    def listener(self, *passed):
        left[0] -= 1
        if left[0] == 0:
            raise StopTraining("enough")

    signature = inspect.signature(getattr(Callback, name))
    listener.__signature__ = signature
    return type("Raising", (Callback,), {name: listener})()


@pytest.mark.parametrize(
    ("hook", "steps"),
    [
        ("on_fit_start", 0),
        ("on_train_start", 0),
        ("on_train_batch_start", 1),
        ("on_train_step_start", 1),
        ("on_before_backward", 1),
        ("on_train_step_end", 1),
        ("on_train_batch_end", 2),
        ("on_step_boundary", 2),
        ("on_metrics", 2),
    ],
)
@pytest.mark.slow_cases(every=4)
def test_stop_training_ends_a_run_in_order_from_anywhere(trainer_of, hook, steps) -> None:
    recorder = Recorder()
    at = 1 if steps == 0 else 2
    trainer = trainer_of(raising(hook, at), recorder, checkpoint=Checkpoint(steps=100))
    trainer.fit(tiny_batches(5), tiny_batches(1))
    assert trainer.interrupted is None
    assert trainer.early_exit.reason == "enough"
    assert recorder.names[-2:] == ["on_fit_end", "on_fit_committed"]
    assert recorder.count("on_fit_exception") == recorder.count("on_train_exception") == 0
    assert recorder.count("on_train_end") == (hook != "on_fit_start")
    assert [path.name for path in trainer.model_dir.glob("checkpoint_*")] == (
        [f"checkpoint_{trainer.global_step}"] if trainer.global_step else []
    )


def test_stop_training_in_a_validation_ends_the_run(trainer_of) -> None:
    recorder = Recorder()
    trainer = trainer_of(raising("on_validate_batch_end"), recorder, eval_frequency=2)
    trainer.fit(tiny_batches(6), tiny_batches(3))
    assert trainer.global_step == 2
    assert recorder.count("on_validate_exception") == 0
    assert recorder.names[-2:] == ["on_fit_end", "on_fit_committed"]


def test_stop_training_in_a_validation_alone_ends_it(trainer_of) -> None:
    recorder = Recorder()
    trainer_of(raising("on_validate_batch_end"), recorder).validate(tiny_batches(3))
    assert recorder.count("on_validate_batch_end") == recorder.count("on_validate_end") == 1
    assert recorder.count("on_validate_exception") == 0


def test_a_signal_leaves_a_checkpoint(trainer_of) -> None:
    trainer = trainer_of(Signalling(signal.SIGINT), checkpoint=Checkpoint(steps=100))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(tiny_batches(5))
    assert (trainer.model_dir / "checkpoint_1").exists()


def test_the_second_signal_ends_the_run_at_once(trainer_of) -> None:
    signalling, recorder = Signalling(signal.SIGINT, signal.SIGINT), Recorder()
    with pytest.raises(KeyboardInterrupt, match="SIGINT a second time"):
        trainer_of(recorder, signalling).fit(tiny_batches(5))
    assert recorder.count("on_fit_exception") == 1
    assert recorder.count("on_train_batch_end") == 0


def test_the_handlers_of_signals_are_those_from_before_after_a_run(trainer_of) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    during = []

    class Looking(Callback):
        def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
            during.extend([signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)])

    with pytest.raises(KeyboardInterrupt):
        trainer_of(Looking(), Signalling(signal.SIGINT)).fit(tiny_batches(2))
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert after == before
    assert not set(map(str, during)) & set(map(str, before))


def test_the_handlers_are_restored_after_an_exception(trainer_of) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer_of(Signalling(signal.SIGINT, signal.SIGINT)).fit(tiny_batches(2))
    assert signal.getsignal(signal.SIGINT) == before


def test_a_run_after_a_signal_is_not_interrupted(trainer_of) -> None:
    trainer = trainer_of(Signalling(signal.SIGINT, batch_idx=2))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(tiny_batches(3))
    assert trainer.interrupted == "SIGINT"
    trainer.remove_callback(trainer.get_callback(Signalling))
    trainer.fit(tiny_batches(3))
    assert trainer.interrupted is None
    assert trainer.global_step == 3
