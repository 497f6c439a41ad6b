"""Runs that end before their time: on request, on a condition, by a signal."""

from __future__ import annotations

import signal

import pytest
from doubles import Recorder, tiny_batches

from modelzoo_trainer import Callback, Checkpoint


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
    assert recorder.names[-2:] == ["on_train_end", "on_fit_end"]


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
    with pytest.raises(TypeError, match=r"^early_exit.register got True, which cannot be called"):
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
    assert recorder.names[-1] == "on_fit_end"


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
    trainer.fit(tiny_batches(5), tiny_batches(1))
    assert trainer.global_step == 1
    assert trainer.interrupted == number.name
    assert signalling.told == [(number.name, 1)]
    assert recorder.names[-3:] == ["on_interrupt", "on_train_end", "on_fit_end"]


def test_a_signal_leaves_a_checkpoint(trainer_of) -> None:
    trainer = trainer_of(Signalling(signal.SIGINT), checkpoint=Checkpoint(steps=100))
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
    trainer.fit(tiny_batches(3))
    assert trainer.interrupted == "SIGINT"
    trainer.remove_callback(trainer.get_callback(Signalling))
    trainer.fit(tiny_batches(3))
    assert trainer.interrupted is None
    assert trainer.global_step == 5
