"""The checkpoints that CheckLoss rolls back to."""

import math

import pytest

from modelzoo_trainer import Callback, Checkpoint, RollBack, TrainingLoop
from modelzoo_trainer.callbacks import CheckLoss

DEVICES = ["cpu", "fake"]


class SaveAfterBatches(Callback):
    """Write a checkpoint after some batches, counted from 0, the first time they are trained on."""

    def __init__(self, *batches):
        self.batches = list(batches)
        self.paths = []

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if batch_idx in self.batches:
            self.batches.remove(batch_idx)
            self.paths.append(trainer.save_checkpoint())


class Loads(Callback):
    """Record what was loaded."""

    def __init__(self):
        self.names = []

    def on_before_load_checkpoint(self, trainer, ckpt_path):
        if ckpt_path is not None:
            self.names.append(ckpt_path.name)


def spoilt(batches, *places):
    return [
        (inputs * math.nan, target) if idx in places else (inputs, target)
        for idx, (inputs, target) in enumerate(batches)
    ]


def loop(steps, accumulation=2):
    return TrainingLoop(max_steps=steps, grad_accum_steps=accumulation)


def same_weights(first, second):
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    return all(own.equal(other) for own, other in pairs)


@pytest.mark.parametrize("device", DEVICES)
def test_one_that_was_written_within_the_bad_step_is_not_gone_back_to(
    make, batches, tmp_path, device
):
    loads = Loads()
    trainer = make(
        SaveAfterBatches(4),
        CheckLoss("rollback", max_rollbacks=1),
        loads,
        device=device,
        loop=loop(4),
        checkpoint=Checkpoint(steps=2),
    )
    trainer.fit(spoilt(batches, 4))
    assert loads.names == ["checkpoint_2"]
    wanted = make(device=device, loop=loop(4), model_dir=tmp_path / "wanted")
    wanted.fit(batches[:4] + batches[6:])
    assert same_weights(trainer, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_nor_is_it_when_a_later_step_is_bad(make, batches, tmp_path, device):
    loads = Loads()
    trainer = make(
        SaveAfterBatches(2),
        CheckLoss("rollback", max_rollbacks=2),
        loads,
        device=device,
        loop=loop(3),
        checkpoint=Checkpoint(save_initial_checkpoint=True),
    )
    trainer.fit(spoilt(batches, 2, 7))
    assert loads.names == ["checkpoint_0", "checkpoint_0"]
    wanted = make(device=device, loop=loop(3), model_dir=tmp_path / "wanted")
    wanted.fit(batches[:2] + batches[4:6] + batches[8:])
    assert same_weights(trainer, wanted)


def test_one_within_an_earlier_step_is_good(make, batches):
    loads = Loads()
    trainer = make(
        SaveAfterBatches(2),
        CheckLoss("rollback"),
        loads,
        loop=loop(4),
        checkpoint=Checkpoint(save_initial_checkpoint=True),
    )
    trainer.fit(spoilt(batches, 4))
    assert loads.names == ["checkpoint_1"]


def test_without_one_from_before_the_error_is_raised(make, batches):
    trainer = make(SaveAfterBatches(0), CheckLoss("rollback"), loop=loop(4))
    with pytest.raises(FloatingPointError, match=r"loss is nan at global_step 1 \(epoch 1"):
        trainer.fit(spoilt(batches, 0))


class Complain(Callback):
    """Report at a step boundary that an earlier step was bad, once."""

    def __init__(self, at, step, batches):
        self.at, self.step, self.batches = at, step, batches

    def on_step_boundary(self, trainer):
        if trainer.global_step == self.at:
            self.at = None
            raise RollBack(
                "bad", step=self.step, batches=self.batches, cause=FloatingPointError("bad")
            )


def test_those_with_the_bad_update_in_their_weights_are_passed_by(make, batches):
    loads = Loads()
    trainer = make(
        Complain(5, 3, [(0, 2)]),
        loads,
        loop=loop(5, accumulation=1),
        checkpoint=Checkpoint(steps=1),
    )
    trainer.fit(batches)
    assert loads.names == ["checkpoint_2"]


def test_a_run_that_resumes_within_a_bad_step_goes_back_behind_it(make, batches, tmp_path):
    bad = spoilt(batches, 4)
    first = make(
        SaveAfterBatches(4), CheckLoss("rollback"), loop=loop(3), checkpoint=Checkpoint(steps=2)
    )
    with pytest.raises(ZeroDivisionError):
        first.fit([*bad[:5], DIVIDES])
    loads = Loads()
    second = make(
        CheckLoss("rollback", max_rollbacks=1), loads, loop=loop(3), checkpoint=Checkpoint(steps=2)
    )
    second.fit(bad)
    assert loads.names == ["checkpoint_2_2", "checkpoint_2"]
    wanted = make(loop=loop(3), model_dir=tmp_path / "wanted")
    wanted.fit(batches[:4] + batches[6:])
    assert same_weights(second, wanted)


class _Divides:
    def __iter__(self):
        raise ZeroDivisionError


DIVIDES = _Divides()
