import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, TrainingLoop
from modelzoo_trainer.callbacks import CheckLoss


class Spoil(Callback):
    """Makes the loss of one step what it is told to be."""

    def __init__(self, step, value, *, in_validation=False):
        self.step, self.value, self.in_validation = step, value, in_validation

    def on_after_forward(self, trainer, model, outputs, batch):
        is_due = trainer.global_step + model.training == self.step
        if is_due and model.training is not self.in_validation:
            outputs["loss"] = outputs["loss"] * self.value


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "nan"), (float("inf"), "inf")])
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_a_loss_that_is_no_number_ends_the_run_with_its_step(make, batches, device, value, word):
    trainer = make(Spoil(3, value), CheckLoss(), device=device, max_steps=10)
    with pytest.raises(FloatingPointError) as caught:
        trainer.fit(batches)
    message = rf"loss is {word} at global_step 3\. Last finite loss: \d\S* at 2\."
    assert caught.match(message)


def test_the_last_finite_loss_is_that_of_the_step_before(make, batches, history):
    trainer = make(Spoil(3, float("nan")), CheckLoss(), max_steps=10)
    with pytest.raises(FloatingPointError) as caught:
        trainer.fit(batches)
    before = dict(history.of("loss"))[2]
    assert f"Last finite loss: {before:.6g} at 2." in str(caught.value)


def test_a_first_loss_that_is_no_number_has_none_before(make, batches):
    with pytest.raises(FloatingPointError, match=r"step 1\. No loss before it was finite"):
        make(Spoil(1, float("nan")), CheckLoss()).fit(batches)


def test_a_validation_loss_is_checked_under_its_name(make, batches):
    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    trainer = make(Spoil(4, float("inf"), in_validation=True), CheckLoss(), loop=loop)
    with pytest.raises(FloatingPointError) as caught:
        trainer.fit(batches, batches[:2])
    message = r"validate_0/loss is inf at global_step 4\. Last finite loss: \d\S* at 2\."
    assert caught.match(message)


def test_finite_losses_pass(make, batches):
    trainer = make(CheckLoss())
    trainer.fit(batches, batches[:2])
    assert trainer.global_step == 4


def test_a_loss_of_shape_one_is_checked_too(make, batches, net):
    class OneElement(net):
        def forward(self, batch):
            return {"loss": super().forward(batch)["loss"].reshape(1)}

    trainer = make(Spoil(2, float("nan")), CheckLoss(), model=OneElement)
    with pytest.raises(FloatingPointError, match="loss is nan at global_step 2"):
        trainer.fit(batches)


def test_a_validation_without_a_loss_passes(make, batches):
    class Scores(nn.Linear):
        def forward(self, batch):
            return {"scores": super().forward(batch[0])}

    make(CheckLoss(), model=lambda: Scores(4, 1)).validate(batches)


def test_a_second_fit_knows_nothing_of_the_first(make, batches):
    trainer = make(Spoil(3, float("nan")), CheckLoss(), loop=TrainingLoop(num_steps=2))
    trainer.fit(batches)
    with pytest.raises(FloatingPointError, match="No loss before"):
        trainer.fit(batches)
    assert torch.is_tensor(trainer.model.head.weight)
