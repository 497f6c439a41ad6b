"""Which states of a checkpoint callbacks get back, and whether they are asked within a fit."""

from __future__ import annotations

import logging

import pytest

from modelzoo_trainer import Callback, Checkpoint
from modelzoo_trainer.callbacks import EarlyStopping, SaveBest
from tests.doubles import tiny_batches

BATCHES = tiny_batches(4)


class Counting(Callback):
    """Has a state that means something to every run."""

    def __init__(self) -> None:
        self.num = 0

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.num += 1

    def state_dict(self):
        return {"num": self.num}

    def load_state_dict(self, state):
        self.num = state["num"]


class OfRun(Counting):
    state_is_of_run = True


class Plain:
    """The same without the base class."""

    state_is_of_run = True
    __init__ = Counting.__init__
    on_train_batch_end = Counting.on_train_batch_end
    state_dict = Counting.state_dict
    load_state_dict = Counting.load_state_dict


def counted(trainer_of, **settings):
    callbacks = [Counting(), OfRun(), Plain()]
    trainer = trainer_of(*callbacks, checkpoint=Checkpoint(steps=2), **settings)
    return trainer, lambda: [callback.num for callback in callbacks]


def test_a_state_of_a_run_comes_back_in_that_run_alone(trainer_of, tmp_path, caplog) -> None:
    first, _ = counted(trainer_of, max_steps=2, model_dir=tmp_path / "run")
    first.fit(BATCHES)
    path = first.model_dir / "checkpoint_2"
    again, nums = counted(trainer_of, max_steps=4, model_dir=tmp_path / "run")
    again.fit(BATCHES)
    assert nums() == [4, 4, 4]
    other, nums = counted(trainer_of, max_steps=4, model_dir=tmp_path / "other")
    other.fit(BATCHES, ckpt_path=path)
    assert nums() == [4, 2, 2]
    assert "has no state of" not in caplog.text


def test_a_state_of_a_run_comes_back_from_another_folder_of_its_own(trainer_of, tmp_path) -> None:
    folder = tmp_path / "checkpoints"
    for steps in (2, 4):
        callback = OfRun()
        trainer_of(
            callback,
            checkpoint=Checkpoint(steps=2, checkpoint_root=folder),
            max_steps=steps,
            model_dir=tmp_path / "run",
        ).fit(BATCHES)
    assert callback.num == 4


def test_a_fit_from_another_folder_logs_which_states_it_does_not_take(
    trainer_of, tmp_path, caplog
) -> None:
    def watching():
        return SaveBest("validate_0/loss"), EarlyStopping("validate_0/loss"), Counting()

    settings = {"checkpoint": Checkpoint(steps=2), "max_steps": 2}
    first = trainer_of(*watching(), model_dir=tmp_path / "first", **settings)
    first.fit(BATCHES, BATCHES[:1])
    caplog.set_level(logging.INFO)
    caplog.clear()
    settings["max_steps"] = 3
    path = first.model_dir / "checkpoint_2"
    trainer_of(*watching(), model_dir=tmp_path / "other", **settings).fit(
        BATCHES, BATCHES[:1], ckpt_path=path
    )
    [told] = [text for text in caplog.messages if "without the state" in text]
    assert told.startswith("SaveBest, EarlyStopping: ")
    assert "Counting" not in told
    for fact in ("checkpoint_2", "other", "model_dir", "first"):
        assert fact in told
    caplog.clear()
    trainer_of(*watching(), model_dir=tmp_path / "first", **settings).fit(BATCHES, BATCHES[:1])
    assert "without the state" not in caplog.text


def test_a_validation_does_not_warn_about_callbacks_of_the_training(
    trainer_of, tmp_path, caplog
) -> None:
    first = trainer_of(OfRun(), checkpoint=Checkpoint(steps=2), max_steps=2)
    first.fit(BATCHES)
    path = first.model_dir / "checkpoint_2"
    other = trainer_of(model_dir=tmp_path / "other")
    caplog.clear()
    for method in (other.validate, other.test, other.validate_all, other.predict):
        method(BATCHES[:1], path)
    assert "OfRun" not in caplog.text
    other.fit(BATCHES, ckpt_path=path)
    assert "state of OfRun, which is not part of this run" in caplog.text


class Asking(Callback):
    """Notes in each hook whether a fit is under way; may fail in it."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.told = {}

    def on_enter_fit(self, trainer, stack, train_dataloader, val_dataloader, loop):
        self.told["enter"] = trainer.is_fitting
        stack.callback(lambda: self.told.update(unwind=trainer.is_fitting))

    def on_validate_start(self, trainer, model, val_dataloader, loop):
        self.told["validate"] = trainer.is_fitting

    def on_fit_end(self, trainer, loop):
        self.told["end"] = trainer.is_fitting
        if self.fails:
            raise RuntimeError("no")


def test_a_trainer_says_whether_a_fit_is_under_way(trainer_of) -> None:
    asking = Asking()
    trainer = trainer_of(asking)
    assert not trainer.is_fitting
    trainer.fit(BATCHES, BATCHES[:1])
    assert asking.told == dict.fromkeys(("enter", "validate", "end", "unwind"), True)
    assert not trainer.is_fitting
    trainer.validate(BATCHES[:1])
    assert asking.told["validate"] is False


def test_after_an_error_no_fit_is_under_way(trainer_of) -> None:
    trainer = trainer_of(Asking(fails=True))
    with pytest.raises(RuntimeError, match="no"):
        trainer.fit(BATCHES)
    assert not trainer.is_fitting
