"""A resumed run validates, counts and ends where the unbroken one does."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, StopTraining
from modelzoo_trainer.errors import RollBack
from tests.doubles import History, Interrupted, TinyModel, differing, tiny_batches, weights_of

pytestmark = pytest.mark.slow


class Crash(Callback):
    """Raises at the n-th call of a hook."""

    def __init__(self, hook: str, at: int) -> None:
        self.hook, self.left = hook, at

    def _count(self, hook: str) -> None:
        if hook == self.hook:
            self.left -= 1
            if self.left == 0:
                raise Interrupted

    def on_validate_start(self, trainer, model, val_dataloader, loop):
        self._count("on_validate_start")

    def on_validate_end(self, trainer, model, loop):
        self._count("on_validate_end")

    def on_train_end(self, trainer, model, loop, loop_idx):
        self._count("on_train_end")

    def on_after_save_checkpoint(self, trainer, ckpt_path):
        self._count("on_after_save_checkpoint")

    def run_validation(self, trainer, loop_idx, is_last):
        self._count("run_validation")

    def on_fit_end(self, trainer, loop):
        self._count("on_fit_end")


class Diary(Callback):
    """Notes validations with what they were told."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, int | None, bool]] = []

    def run_validation(self, trainer, loop_idx, is_last):
        self.lines.append((trainer.global_step, loop_idx, is_last))


def trainer_for(trainer_of, tmp_path, name, *callbacks, **settings):
    arguments = {"num_epochs": 2, "eval_frequency": 2, "checkpoint": Checkpoint(steps=1)}
    return trainer_of(*callbacks, model_dir=tmp_path / name, **(arguments | settings))


WHOLE = [(2, 0, False), (4, 1, False), (6, 2, False), (8, 3, False), (10, 4, True)]


@pytest.mark.parametrize("hook", ["on_validate_start", "on_validate_end", "on_train_end"])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_validation_that_a_crash_cut_off_is_done_again(trainer_of, tmp_path, hook, at) -> None:
    broken, resumed = Diary(), Diary()
    with pytest.raises(Interrupted):
        trainer_for(trainer_of, tmp_path, "run", broken, Crash(hook, at)).fit(
            tiny_batches(5), tiny_batches(1)
        )
    trainer_for(trainer_of, tmp_path, "run", resumed).fit(tiny_batches(5), tiny_batches(1))
    assert broken.lines + resumed.lines == WHOLE


def test_a_validation_that_was_done_is_not_done_twice(trainer_of, tmp_path) -> None:
    broken, resumed = Diary(), Diary()
    with pytest.raises(Interrupted):
        trainer_for(trainer_of, tmp_path, "run", broken, Crash("on_after_save_checkpoint", 5)).fit(
            tiny_batches(5), tiny_batches(1)
        )
    trainer_for(trainer_of, tmp_path, "run", resumed).fit(tiny_batches(5), tiny_batches(1))
    assert broken.lines + resumed.lines == WHOLE


@pytest.mark.parametrize("settings", [{"eval_frequency": 1.0}, {"eval_frequency": 0.4}])
def test_the_last_validation_is_not_lost(trainer_of, tmp_path, settings) -> None:
    whole, broken, resumed = Diary(), Diary(), Diary()
    trainer_for(trainer_of, tmp_path, "whole", whole, **settings).fit(
        tiny_batches(5), tiny_batches(1)
    )
    with pytest.raises(Interrupted):
        trainer_for(
            trainer_of,
            tmp_path,
            "run",
            broken,
            Crash("on_validate_start", len(whole.lines)),
            **settings,
        ).fit(tiny_batches(5), tiny_batches(1))
    trainer_for(trainer_of, tmp_path, "run", resumed, **settings).fit(
        tiny_batches(5), tiny_batches(1)
    )
    assert broken.lines + resumed.lines == whole.lines


def test_a_stop_within_a_validation_logs_no_part_of_it(trainer_of, tmp_path) -> None:
    class Stop(Callback):
        def on_validate_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.early_exit.interrupt("SIGUSR1")

    history, resumed = History(), History()
    trainer = trainer_for(trainer_of, tmp_path, "run", Stop(), loggers=history)
    trainer.fit(tiny_batches(5), tiny_batches(3))
    assert history.of("validate_0/loss") == []
    again = trainer_for(trainer_of, tmp_path, "run", loggers=resumed)
    again.fit(tiny_batches(5), tiny_batches(3))
    assert [step for step, _ in resumed.of("validate_0/loss")] == [2, 4, 6, 8, 10]


def test_a_run_of_so_many_more_steps_takes_the_rest_after_a_crash(trainer_of, tmp_path) -> None:
    settings = {"num_epochs": None, "num_steps": 4, "eval_frequency": None}
    first = trainer_for(trainer_of, tmp_path, "run", **settings)
    first.fit(tiny_batches(50))
    with pytest.raises(Interrupted):
        trainer_for(
            trainer_of, tmp_path, "run", Crash("on_after_save_checkpoint", 3), **settings
        ).fit(tiny_batches(50))
    third = trainer_for(trainer_of, tmp_path, "run", **settings)
    third.fit(tiny_batches(50))
    assert third.global_step == 8


def fit_more(trainer_of, tmp_path, num_steps, *callbacks, **settings):
    """Start a run of so many more steps in the same folder, as another process would."""
    arguments = {"num_epochs": None, "num_steps": num_steps, "eval_frequency": 1.0} | settings
    trainer = trainer_for(trainer_of, tmp_path, "run", *callbacks, **arguments)
    trainer.raise_on_interrupt = False
    trainer.fit(tiny_batches(50), tiny_batches(2))
    return trainer


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("eval_frequency", [None, 2])
@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 3)])
def test_a_finished_run_of_num_steps_is_followed_by_num_steps_more(
    trainer_of, tmp_path, first, second, eval_frequency, every
) -> None:
    settings = {"eval_frequency": eval_frequency, "checkpoint": Checkpoint(steps=every)}
    before, after = Diary(), Diary()
    fit_more(trainer_of, tmp_path, first, before, **settings)
    trainer = fit_more(trainer_of, tmp_path, second, after, **settings)
    assert trainer.global_step == first + second
    validated = [step for step, _, _ in before.lines + after.lines]
    assert len(set(validated)) == len(validated)  # none twice
    assert [idx for _, idx, _ in after.lines] == list(range(len(after.lines)))


@pytest.mark.parametrize(
    ("hook", "at"),
    [
        ("on_after_save_checkpoint", 4),
        ("on_train_end", 1),
        ("on_validate_start", 1),
        ("on_validate_end", 1),
        ("run_validation", 1),
        ("on_fit_end", 1),
    ],
)
def test_a_run_of_num_steps_that_was_cut_off_after_its_last_step_trains_no_further(
    trainer_of, tmp_path, hook, at
) -> None:
    broken, resumed = Diary(), Diary()
    with pytest.raises(Interrupted):
        fit_more(trainer_of, tmp_path, 4, broken, Crash(hook, at))
    assert fit_more(trainer_of, tmp_path, 4, resumed).global_step == 4
    assert {step for step, _, _ in resumed.lines} == {4}
    assert fit_more(trainer_of, tmp_path, 4).global_step == 8  # it has finished by now


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validate_batch_end"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_run_of_num_steps_that_was_stopped_at_its_last_step_trains_no_further(
    trainer_of, tmp_path, hook, every
) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if hook == "on_train_batch_end" and trainer.global_step == 4:
                trainer.early_exit.interrupt("SIGTERM")

        def on_validate_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if hook == "on_validate_batch_end":
                trainer.early_exit.interrupt("SIGTERM")

    diary = Diary()
    stopped = fit_more(trainer_of, tmp_path, 4, Stop(), checkpoint=Checkpoint(steps=every))
    assert (stopped.global_step, stopped.interrupted) == (4, "SIGTERM")
    assert fit_more(trainer_of, tmp_path, 4, diary).global_step == 4
    assert diary.lines == [(4, 0, True)]
    assert fit_more(trainer_of, tmp_path, 3).global_step == 7


def test_a_finished_run_of_max_steps_is_followed_by_num_steps_more(trainer_of, tmp_path) -> None:
    trainer_for(trainer_of, tmp_path, "run", num_epochs=None, max_steps=2).fit(tiny_batches(50))
    assert fit_more(trainer_of, tmp_path, 3).global_step == 5


def test_a_run_that_was_cut_off_says_that_num_steps_is_another(
    trainer_of, tmp_path, caplog
) -> None:
    with pytest.raises(Interrupted):
        fit_more(trainer_of, tmp_path, 4, Crash("on_after_save_checkpoint", 2))
    assert fit_more(trainer_of, tmp_path, 6).global_step == 6
    (said,) = [line for line in caplog.messages if "num_steps" in line]
    assert all(part in said for part in ("num_steps 4", "now 6", "step 0", "step 2"))


@pytest.mark.parametrize(("first", "second", "steps"), [(2, 2, 4), (2, 3, 3)])
def test_a_checkpoint_that_does_not_know_its_num_steps_is_read_as_before(
    trainer_of, tmp_path, first, second, steps
) -> None:
    class Earlier(Callback):
        """Makes the checkpoints that versions without the entry wrote."""

        def postprocess_checkpoint(self, trainer, state_dict):
            del state_dict["schedule"]["num_steps"]

    fit_more(trainer_of, tmp_path, first, Earlier())
    (tmp_path / "run" / ".finished.json").unlink()
    assert fit_more(trainer_of, tmp_path, second).global_step == steps


def test_going_back_to_where_a_run_of_num_steps_began_does_not_move_its_end(
    trainer_of, tmp_path
) -> None:
    class GoBack(Callback):
        left = 1

        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            if trainer.global_step == 2 and self.left:
                self.left = 0
                cause = RuntimeError("nowhere to go back to")
                raise RollBack(
                    "bad", step=3, batches=[(trainer.data.epoch, batch_idx)], cause=cause
                )

    fit_more(trainer_of, tmp_path, 2)
    with pytest.raises(Interrupted):
        fit_more(trainer_of, tmp_path, 4, GoBack(), Crash("on_after_save_checkpoint", 2))
    assert fit_more(trainer_of, tmp_path, 4).global_step == 6


class Drawing(Callback):
    """Draws from all generators of the host, and lets the numbers decide the training."""

    def __init__(self) -> None:
        self.drawn: list[tuple[int, float, float, float]] = []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        numbers = random.random(), float(np.random.rand()), float(torch.rand(()))
        self.drawn.append((batch_idx, *numbers))
        with torch.no_grad():
            next(model.parameters()).mul_(1 + 0.01 * sum(numbers))

    def on_validate_batch_start(self, trainer, model, batch, batch_idx):
        random.random(), np.random.rand(), torch.rand(())


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("seed", [0, None])
def test_the_generators_of_the_host_go_on_where_they_were(trainer_of, tmp_path, step, seed) -> None:
    def trainer(name, *callbacks):
        return trainer_for(
            trainer_of, tmp_path, name, *callbacks, model=lambda: TinyModel(dropout=0.5), seed=seed
        )

    torch.manual_seed(5)
    whole, broken, resumed = Drawing(), Drawing(), Drawing()
    random.seed(1), np.random.seed(1)
    unbroken = trainer("whole", whole)
    random.seed(1), np.random.seed(1), torch.manual_seed(5)
    unbroken.fit(tiny_batches(5), tiny_batches(2))
    torch.manual_seed(5)
    first = trainer("run", broken, Crash("on_after_save_checkpoint", step))
    random.seed(1), np.random.seed(1), torch.manual_seed(5)
    with pytest.raises(Interrupted):
        first.fit(tiny_batches(5), tiny_batches(2))
    torch.manual_seed(99)
    random.seed(99), np.random.seed(99)
    second = trainer("run", resumed)
    second.fit(tiny_batches(5), tiny_batches(2))
    assert broken.drawn[:step] + resumed.drawn == whole.drawn
    assert differing(weights_of(second), weights_of(unbroken)) == []


def test_a_validation_leaves_the_generators_as_they_were(trainer_of, tmp_path) -> None:
    often, never = Drawing(), Drawing()
    for name, drawing, frequency in (("often", often, 1), ("never", never, None)):
        trainer = trainer_for(trainer_of, tmp_path, name, drawing, eval_frequency=frequency)
        random.seed(1), np.random.seed(1)
        trainer.fit(tiny_batches(5), tiny_batches(2))
    assert often.drawn == never.drawn


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_after_backward", "on_train_step_end"])
@pytest.mark.parametrize("grad_accum_steps", [1, 2])
def test_a_run_that_stop_training_ended_anywhere_is_resumed_exactly(
    trainer_of, tmp_path, hook, grad_accum_steps
) -> None:
    def trainer(name, *callbacks):
        return trainer_for(
            trainer_of,
            tmp_path,
            name,
            *callbacks,
            model=lambda: TinyModel(dropout=0.5),
            grad_accum_steps=grad_accum_steps,
            checkpoint=Checkpoint(steps=100),
        )

    class Stop(Callback):
        left = 4

        def _count(self, name):
            if name == hook:
                self.left -= 1
                if self.left == 0:
                    raise StopTraining("enough")

        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            self._count("on_train_batch_start")

        def on_after_backward(self, trainer, model, outputs):
            self._count("on_after_backward")

        def on_train_step_end(self, trainer, model, outputs, batch):
            self._count("on_train_step_end")

    unbroken = trainer("whole")
    unbroken.fit(tiny_batches(5), tiny_batches(1))
    trainer("run", Stop()).fit(tiny_batches(5), tiny_batches(1))
    resumed = trainer("run")
    resumed.fit(tiny_batches(5), tiny_batches(1))
    assert resumed.global_step == unbroken.global_step
    assert differing(weights_of(resumed), weights_of(unbroken)) == []


class Epochs(Callback):
    """Notes where passes begin and end."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_train_epoch_start(self, trainer, epoch):
        self.lines.append(f"start {epoch}")

    def on_train_epoch_end(self, trainer, epoch):
        self.lines.append(f"end {epoch}")


@pytest.mark.parametrize("at", [5, 10])
def test_the_end_of_a_pass_that_a_crash_cut_off_is_told_once(trainer_of, tmp_path, at) -> None:
    broken, resumed = Epochs(), Epochs()
    with pytest.raises(Interrupted):
        trainer_for(trainer_of, tmp_path, "run", broken, Crash("on_after_save_checkpoint", at)).fit(
            tiny_batches(5), tiny_batches(1)
        )
    trainer_for(trainer_of, tmp_path, "run", resumed).fit(tiny_batches(5), tiny_batches(1))
    assert broken.lines + resumed.lines == ["start 0", "end 0", "start 1", "end 1"]
