"""Short epochs: by callback, by environment variable, and by context manager."""

import pytest
import torch

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    ConfigError,
    TrainingLoop,
    register_global_callback,
)
from modelzoo_trainer.callbacks.limit_batches import LimitBatches, LimitEvalSteps

VARIABLE = "MODELZOO_LIMIT_BATCHES"


class Count(Callback):
    def __init__(self):
        self.train, self.val = [], 0

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.train.append(batch_idx)

    def on_validate_batch_start(self, trainer, model, batch, batch_idx):
        self.val += 1


def counted(make, batches, *callbacks, **settings):
    count = Count()
    trainer = make(*callbacks, count, **({"loop": TrainingLoop(num_epochs=2)} | settings))
    trainer.fit(batches, batches[:5])
    return count.train, count.val, trainer


def test_passes_of_training_and_validation_end_there(make, batches, caplog):
    train, val, trainer = counted(make, batches, LimitBatches(3))
    assert (train, val) == ([0, 1, 2] * 2, 3)
    assert trainer.schedule.total_steps == 6
    assert "limited to num_batches=3" in caplog.text


def test_a_limit_beyond_the_data_changes_nothing(make, batches):
    train, val, trainer = counted(make, batches, LimitBatches(99))
    assert (len(train), val, trainer.schedule.total_steps) == (20, 5, 20)


def test_the_least_counts(make, batches):
    loop = TrainingLoop(num_epochs=1, steps_per_epoch=4, eval_steps=1)
    train, val, _ = counted(make, batches, LimitBatches(3), LimitBatches(2), loop=loop)
    assert (train, val) == ([0, 1], 1)


def test_a_loader_whose_length_is_not_known_is_limited_too(make, batches):
    count = Count()
    trainer = make(LimitBatches(3), count, loop=TrainingLoop(num_epochs=2))
    trainer.fit(lambda: iter(batches))
    assert count.train == [0, 1, 2] * 2


def test_the_last_window_of_a_pass_may_be_short(make, batches):
    loop = TrainingLoop(num_epochs=2, grad_accum_steps=2)
    train, _, trainer = counted(make, batches, LimitBatches(3), loop=loop)
    assert train == [0, 1, 2] * 2
    assert trainer.global_step == trainer.schedule.total_steps == 4


def test_a_fit_after_it_was_taken_out_has_all_batches(make, batches):
    limit = LimitBatches(3)
    trainer = make(limit, loop=TrainingLoop(num_epochs=1))
    trainer.fit(batches)
    trainer.remove_callback(limit)
    trainer.fit(batches, ckpt_path=None)
    assert trainer.global_step == 13
    assert trainer.loop.val_loop.eval_steps is None


class Crash(Exception):
    pass


class CrashAt(Callback):
    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.global_step == 4:
            raise Crash


def test_a_run_that_resumes_takes_the_same_batches(make, batches, tmp_path):
    train, _, whole = counted(make, batches, LimitBatches(3), model_dir=tmp_path / "whole")
    settings = {"checkpoint": Checkpoint(steps=2), "loop": TrainingLoop(num_epochs=2)}
    with pytest.raises(Crash):
        make(LimitBatches(3), CrashAt(), **settings).fit(batches, batches[:5])
    rest, _, trainer = counted(make, batches, LimitBatches(3))
    assert rest == train[4:]
    assert torch.equal(trainer.model.head.weight, whole.model.head.weight)


# ---- inside `with`


def test_all_trainers_have_it_inside_with(make, batches):
    trainer = make(loop=TrainingLoop(num_epochs=1))
    with LimitBatches(3):
        trainer.fit(batches)
        inner = make(loop=TrainingLoop(num_epochs=1))
        inner.fit(batches, ckpt_path=None)
    assert (trainer.global_step, inner.global_step) == (3, 3)
    trainer.fit(batches, ckpt_path=None)
    assert trainer.global_step == 13


def test_a_trainer_made_inside_with_keeps_the_limit(make, batches):
    with LimitBatches(3) as limit:
        inner = make(loop=TrainingLoop(num_epochs=1))
    inner.fit(batches)
    assert inner.global_step == 3
    inner.remove_callback(limit)
    inner.fit(batches, ckpt_path=None)
    assert inner.global_step == 13


def test_a_global_limit_ends_with_its_handle(make, batches):
    handle = register_global_callback(LimitBatches(3))
    trainer = make(loop=TrainingLoop(num_epochs=1))
    handle.remove()
    trainer.fit(batches)
    assert trainer.global_step == 10


# ---- by the environment


def test_the_environment_limits_each_trainer(make, batches, monkeypatch):
    monkeypatch.setenv(VARIABLE, "2")
    train, val, _ = counted(make, batches)
    assert (train, val) == ([0, 1] * 2, 2)


def test_the_least_of_both_counts(make, batches, monkeypatch):
    monkeypatch.setenv(VARIABLE, "4")
    train, _, _ = counted(make, batches, LimitBatches(2), loop=TrainingLoop(num_epochs=1))
    assert train == [0, 1]


@pytest.mark.parametrize("text", ["", "none", "None"])
def test_the_environment_may_say_that_there_is_no_limit(make, batches, monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    train, _, trainer = counted(make, batches, loop=TrainingLoop(num_epochs=1))
    assert len(train) == 10
    assert trainer.get_callback(LimitBatches) is None


@pytest.mark.parametrize("text", ["few", "0", "-1", "1.5"])
def test_what_is_not_a_number_is_refused_by_name(make, monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match=f"{VARIABLE}: '{text}' is not .* > 0"):
        make()


def test_a_limit_that_is_not_positive_is_refused():
    with pytest.raises(ConfigError, match=r"LimitBatches\.num_batches: expected .*, got 0"):
        LimitBatches(0)


def test_a_smaller_limit_than_the_checkpoint_has_got_to_is_reported_by_its_name(make, batches):
    make(LimitBatches(5), checkpoint=Checkpoint(steps=1), max_steps=3).fit(batches)
    with pytest.raises(ConfigError, match="LimitBatches ends an epoch after 2"):
        make(LimitBatches(2), max_steps=6).fit(batches)


@pytest.mark.parametrize("callback", [LimitBatches, LimitEvalSteps])
def test_no_number_is_refused(callback):
    with pytest.raises(ConfigError, match="expected an integer > 0, got null"):
        callback(None)
