import pytest
import torch
from torch import nn

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    ConfigError,
    Trainer,
    TrainingLoop,
    register_global_callback,
)
from modelzoo_trainer.callbacks import CheckLoss, SpikeDetection, TerminateOnNaN


class Spoil(Callback):
    """Set the loss of one step."""

    def __init__(self, step, value, *, in_validation=False):
        self.step, self.value, self.in_validation = step, value, in_validation

    def on_after_forward(self, trainer, model, outputs, batch):
        is_due = trainer.global_step + model.training == self.step
        if is_due and model.training is not self.in_validation:
            outputs["loss"] = outputs["loss"] * self.value


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "nan"), (float("inf"), "inf")])
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_a_loss_that_is_not_a_number_ends_the_run_with_its_step(make, batches, device, value, word):
    trainer = make(Spoil(3, value), CheckLoss(), device=device, max_steps=10)
    with pytest.raises(FloatingPointError) as caught:
        trainer.fit(batches)
    message = rf"loss is {word} at global_step 3\. Last finite loss: \d\S* at step 2\."
    assert caught.match(message)


def test_the_last_finite_loss_is_that_of_the_step_before(make, batches, history):
    trainer = make(Spoil(3, float("nan")), CheckLoss(), max_steps=10)
    with pytest.raises(FloatingPointError) as caught:
        trainer.fit(batches)
    before = dict(history.of("loss"))[2]
    assert f"Last finite loss: {before:.6g} at step 2." in str(caught.value)


def test_a_first_loss_that_is_not_a_number_has_none_before(make, batches):
    with pytest.raises(
        FloatingPointError,
        match=r"step 1\. There was no finite loss before.*CheckLoss\(policy='skip'\)",
    ):
        make(Spoil(1, float("nan")), CheckLoss()).fit(batches)


def test_a_validation_loss_is_checked_under_its_name(make, batches):
    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    trainer = make(Spoil(4, float("inf"), in_validation=True), CheckLoss(), loop=loop)
    with pytest.raises(FloatingPointError) as caught:
        trainer.fit(batches, batches[:2])
    message = r"validate_0/loss is inf at global_step 4\. Last finite loss: \d\S* at step 2\."
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
    with pytest.raises(FloatingPointError, match="no finite loss before"):
        trainer.fit(batches)
    assert torch.is_tensor(trainer.model.head.weight)


# ---- defaults


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_a_nan_loss_ends_a_python_run_that_names_no_check(make, batches, device):
    with pytest.raises(FloatingPointError, match="loss is nan at global_step 3"):
        make(Spoil(3, float("nan")), device=device, max_steps=10).fit(batches)


def test_a_validation_alone_is_checked_by_default(make, batches):
    trainer = make(Spoil(0, float("nan"), in_validation=True))
    with pytest.raises(FloatingPointError, match="validate_0/loss is nan"):
        trainer.validate(batches)


def test_without_the_default_check_a_nan_loss_does_not_stop_the_run(make, batches):
    trainer = make(Spoil(2, float("nan")), check_loss=False, max_steps=3)
    trainer.fit(batches)
    assert (trainer.global_step, trainer.get_callback(CheckLoss)) == (3, None)


@pytest.mark.parametrize("wrong", [None, "skip", CheckLoss])
def test_another_value_of_the_default_check_is_refused(make, wrong):
    with pytest.raises(ConfigError, match=r"^check_loss is .*True or False\b.*CheckLoss\("):
        make(check_loss=wrong)


def test_the_default_comes_after_the_users_callbacks(make):
    trainer = make(Spoil(3, 1.0))
    names = ["Spoil", "CheckLoss", "History", "ProgressLogger"]
    assert [*trainer.callbacks][-4:] == names


class Own(CheckLoss):
    """A custom check."""


@pytest.mark.parametrize("given", [CheckLoss("skip"), Own(), TerminateOnNaN()])
def test_a_custom_check_takes_the_place_of_the_default(make, given):
    trainer = make(given)
    assert trainer.get_callbacks((CheckLoss, TerminateOnNaN)) == [given]


@pytest.mark.parametrize(("finite_only", "num_checks"), [(True, 0), (False, 1)])
def test_a_spike_detection_that_finds_such_losses_takes_its_place(make, finite_only, num_checks):
    trainer = make(SpikeDetection(finite_only=finite_only))
    assert len(trainer.get_callbacks(CheckLoss)) == num_checks


def test_a_global_check_takes_the_place_of_the_default_while_it_is_registered(make):
    trainer, check = make(), CheckLoss()
    [default] = trainer.get_callbacks(CheckLoss)
    handle = register_global_callback(check)
    assert trainer.get_callbacks(CheckLoss) == [check]
    handle.remove()
    assert trainer.get_callbacks(CheckLoss) == [default]


def test_a_check_that_is_added_later_takes_the_place_of_the_default(make):
    trainer, check = make(), CheckLoss("skip")
    added = trainer.add_callback(check)
    assert trainer.get_callbacks(CheckLoss) == [check]
    added.remove()
    [default] = trainer.get_callbacks(CheckLoss)
    trainer.remove_callback(default)
    assert trainer.get_callbacks(CheckLoss) == []


def test_a_subclass_of_the_trainer_has_the_default_too(tmp_path, net):
    class Mine(Trainer):
        def __init__(self, **settings):
            super().__init__(device="cpu", **settings)

    with Mine(model=net, model_dir=tmp_path / "mine") as trainer:
        assert trainer.get_callback(CheckLoss) is not None


@pytest.mark.parametrize("steps", [[False, True], [True, False], [True, True]])
def test_a_checkpoint_is_resumed_with_and_without_the_default_without_a_warning(
    make, batches, caplog, steps
):
    for number, has_check in enumerate(steps, 1):
        trainer = make(checkpoint=Checkpoint(steps=1), max_steps=number, check_loss=has_check)
        trainer.fit(batches)
        assert trainer.global_step == number
        trainer.close()
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == []


def test_the_state_of_a_files_check_is_not_missed_by_the_default(make, batches, caplog):
    settings = {"checkpoint": Checkpoint(steps=1)}
    with make(CheckLoss(), max_steps=1, **settings) as first:
        first.fit(batches)
    with make(max_steps=2, **settings) as trainer:
        trainer.fit(batches)
    assert trainer.global_step == 2
    assert "CheckLoss" not in caplog.text


def test_a_training_step_that_returns_no_loss_is_not_checked(tmp_path, net, batches):
    class Own(Trainer):
        def training_step(self, batch):
            super().training_step(batch)
            return {}

    settings = {"model": net, "optimizer": lambda model: torch.optim.SGD(model.parameters())}
    with Own(device="cpu", model_dir=tmp_path / "own", **settings) as trainer:
        trainer.fit(batches)
    assert trainer.global_step == len(batches)


def test_a_loss_of_several_numbers_is_checked_by_each(tmp_path, batches):
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, batch):
            return {"loss": self.weight * torch.tensor([1.0, self.factor])}

    class Summed(Trainer):
        def backward(self, outputs, batch):
            outputs["loss"].sum().backward()

    model = Several()
    settings = {"optimizer": lambda model: torch.optim.SGD(model.parameters())}
    with Summed(device="cpu", model=model, model_dir=tmp_path / "own", **settings) as trainer:
        model.factor = 1.0
        trainer.fit(batches)
        model.factor = float("nan")
        with pytest.raises(FloatingPointError, match="loss is nan"):
            trainer.fit(batches)


@pytest.mark.parametrize("returned", ["nothing", "the loss"])
def test_a_custom_training_step_may_return_anything(make, batches, tmp_path, returned):
    class Own(Trainer):
        def training_step(self, batch):
            loss = self.model(batch)["loss"]
            loss.backward()
            self.optimizer_step()
            self.optimizer_zero_grad()
            loss = loss * float("nan") if self.global_step == 3 else loss
            return loss if returned == "the loss" else None

    trainer = Own(
        device="cpu",
        model_dir=tmp_path / "own",
        model=type(make().model),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(max_steps=5),
    )
    if returned == "nothing":
        trainer.fit(batches)
        assert trainer.global_step == 5
    else:
        with pytest.raises(FloatingPointError, match="loss is nan at global_step 4"):
            trainer.fit(batches)
