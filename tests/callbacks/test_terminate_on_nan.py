"""A non-finite loss stops the run gracefully, and the weights do not change."""

import math

import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, ConfigError, TrainingLoop, checkpointing
from modelzoo_trainer.callbacks import CheckLoss, default_callbacks
from modelzoo_trainer.callbacks.terminate_on_nan import TerminateOnNaN


def spoil(batches, *numbers, value=math.nan):
    return [
        (inputs, torch.full_like(target, value) if idx in numbers else target)
        for idx, (inputs, target) in enumerate(batches)
    ]


class Ends(Callback):
    def __init__(self):
        self.calls = []

    def on_train_end(self, trainer, model, loop, loop_idx):
        self.calls.append("train")

    def on_fit_end(self, trainer, loop):
        self.calls.append("fit")

    def on_fit_exception(self, trainer, exception):
        self.calls.append("exception")


def weights(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("beside", [[], [CheckLoss()]], ids=["alone", "beside CheckLoss"])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.slow_cases(every=4)
def test_the_run_ends_with_the_weights_from_before(
    make, batches, value, beside, is_first, tmp_path
):
    before = make(optimizer=momentum, max_steps=2, model_dir=tmp_path / "before")
    before.fit(batches)
    ends = Ends()
    callbacks = [TerminateOnNaN(), *beside] if is_first else [*beside, TerminateOnNaN()]
    trainer = make(*callbacks, ends, optimizer=momentum)
    trainer.fit(spoil(batches, 2, value=value))
    assert trainer.global_step == 3
    assert torch.equal(weights(trainer), weights(before))
    assert ends.calls == ["train", "fit"]
    assert trainer.early_exit.reason.startswith(
        f"TerminateOnNaN: loss is {value} at global_step 3 (epoch 1, batch 2)"
    )
    own, other = trainer.optimizer.state_dict()["state"], before.optimizer.state_dict()["state"]
    assert torch.equal(own[0]["momentum_buffer"], other[0]["momentum_buffer"])


@pytest.mark.parametrize("is_checked", [True, False])
def test_gradients_that_are_not_numbers_end_it_as_well_unless_disabled(make, batches, is_checked):
    class SpoilGradients(Callback):
        def on_after_backward(self, trainer, model, outputs):
            if trainer.data.num_batches == 2:
                model.head.weight.grad.fill_(math.inf)

    trainer = make(SpoilGradients(), TerminateOnNaN(check_gradients=is_checked))
    trainer.fit(batches)
    assert trainer.global_step == (2 if is_checked else 3)
    assert bool(weights(trainer).isfinite().all()) == is_checked


def test_a_device_that_tells_late_keeps_its_weights(make, batches):
    trainer = make(TerminateOnNaN(), *default_callbacks(), device="fake", max_steps=9)
    trainer.fit(spoil(batches, 3, 4))
    assert 4 <= trainer.global_step < 9
    assert weights(trainer).isfinite().all()


def test_it_counts_the_steps_that_were_skipped(make, batches, history):
    make(TerminateOnNaN()).fit(spoil(batches, 1))
    assert history.of("skipped_steps") == [(1, 0), (2, 1)]


def test_a_window_of_batches_is_skipped_as_a_whole(make, batches):
    loop = TrainingLoop(max_steps=4, grad_accum_steps=2)
    trainer = make(TerminateOnNaN(), loop=loop)
    trainer.fit(spoil(batches, 2))
    assert trainer.global_step == 2
    assert trainer.data.num_batches == 4
    assert weights(trainer).isfinite().all()


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_a_validation_ends_the_fit(make, batches, device):
    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    trainer = make(*default_callbacks(), TerminateOnNaN(), loop=loop, device=device)
    trainer.fit(batches, spoil(batches[:3], 0))
    assert trainer.global_step == 2
    assert "validation loss is nan at global_step 2" in trainer.early_exit.reason


def test_a_validation_alone_ends_too(make, batches):
    trainer = make(*default_callbacks(), TerminateOnNaN())
    trainer.validate(spoil(batches[:3], 0))
    assert not trainer.val_is_complete
    trainer.validate(batches[:3])
    assert trainer.val_is_complete


def test_the_last_checkpoint_has_the_weights_from_before(make, batches):
    trainer = make(TerminateOnNaN(), checkpoint=Checkpoint(steps=2))
    trainer.fit(spoil(batches, 2))
    saved = checkpointing.load(trainer.model_dir / "checkpoint_3")
    assert torch.equal(saved["model"]["head.weight"], trainer.model.head.weight)
    assert saved["model"]["head.weight"].isfinite().all()


def test_a_run_that_is_started_again_ends_at_once_until_the_callback_is_out(make, batches):
    spoilt = spoil(batches, 2)
    make(TerminateOnNaN(), checkpoint=Checkpoint(steps=1)).fit(spoilt)
    again = make(TerminateOnNaN(), checkpoint=Checkpoint(steps=1))
    again.fit(spoilt)
    assert again.global_step == 3
    assert "TerminateOnNaN stopped this run before: loss is nan" in again.early_exit.reason
    without = make(checkpoint=Checkpoint(steps=1, disable_strict_checkpoint_loading=True))
    without.fit(spoilt)
    assert without.global_step == 4


def test_another_run_that_begins_with_its_checkpoint_continues(make, batches, tmp_path):
    first = make(TerminateOnNaN(), checkpoint=Checkpoint(steps=1))
    first.fit(spoil(batches, 2))
    other = make(TerminateOnNaN(), model_dir=tmp_path / "other")
    other.fit(batches, ckpt_path=first.model_dir / "checkpoint_3")
    assert other.global_step == 4


def test_the_next_fit_begins_again(make, batches):
    trainer = make(TerminateOnNaN())
    trainer.fit(spoil(batches, 1))
    trainer.fit(batches, ckpt_path=None)
    assert trainer.global_step == 4


def test_check_loss_raises_again_when_it_is_out(make, batches):
    check, stop = CheckLoss(), TerminateOnNaN()
    trainer = make(check, stop)
    trainer.fit(spoil(batches, 0))
    trainer.remove_callback(stop)
    with pytest.raises(FloatingPointError):
        trainer.fit(spoil(batches, 0), ckpt_path=None)


@pytest.mark.parametrize(
    "other", [CheckLoss("skip"), CheckLoss("rollback"), CheckLoss(spike_window=8)]
)
def test_a_check_loss_that_decides_otherwise_is_refused(make, other):
    with pytest.raises(ConfigError, match="callbacks has TerminateOnNaN and a CheckLoss"):
        make(TerminateOnNaN(), other)


def test_two_of_them_are_refused(make, batches):
    with pytest.raises(ConfigError, match="two TerminateOnNaN"):
        make(TerminateOnNaN(), TerminateOnNaN()).fit(batches)
