import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, ConfigError, MixedPrecision, TrainingLoop
from modelzoo_trainer.callbacks.nan_checker import NaNChecker

DEVICES = pytest.mark.parametrize("device", ["cpu", "fake"])


class Spoil(nn.Module):
    """Insert a number, from a given call on, into the output or its gradient."""

    def __init__(self, at, value=float("nan"), backward=False):
        super().__init__()
        self.num_left, self.value, self.backward = at, value, backward

    def forward(self, hidden):
        self.num_left -= 1
        if self.num_left:
            return hidden
        if self.backward:
            hidden.register_hook(lambda grad: grad * self.value)
            return hidden
        return hidden + self.value


def broken(net, spoil):
    """Return a function that creates the net with a module between its two layers."""

    class Broken(net):
        def __init__(self):
            super().__init__()
            self.layers.insert(1, spoil)

    return Broken


@DEVICES
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_the_module_whose_output_is_first_is_named(make, batches, net, device, value):
    trainer = make(NaNChecker(), model=broken(net, Spoil(3, value)), device=device, max_steps=9)
    with pytest.raises(FloatingPointError, match=r"the output of 'layers\.1' is not finite at glo"):
        trainer.fit(batches)


@DEVICES
def test_the_step_is_named(make, batches, net, device):
    trainer = make(NaNChecker(), model=broken(net, Spoil(3)), device=device, max_steps=9)
    with pytest.raises(
        FloatingPointError,
        match=r"global_step 3\. .* first of \d+ non-finite tensors among the \d+",
    ):
        trainer.fit(batches)
    assert not any(module._forward_hooks for module in trainer.model.modules())


@DEVICES
def test_a_gradient_is_found_where_it_comes_by(make, batches, net, device):
    spoil = Spoil(2, backward=True)
    trainer = make(NaNChecker(), model=broken(net, spoil), device=device, max_steps=9)
    with pytest.raises(
        FloatingPointError, match=r"the gradient of the output of 'layers\.1' is not finite at"
    ):
        trainer.fit(batches)


class OfAParameter(nn.Module):
    """A root whose gradient at 0 is infinite."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        return batch[0].square().mean() + self.scale.sqrt().sum()


@DEVICES
def test_the_gradient_of_a_parameter_is_named(make, batches, device):
    with pytest.raises(FloatingPointError, match="the gradient of the parameter 'scale' is not"):
        make(NaNChecker(), model=OfAParameter, device=device).fit(batches)


@DEVICES
def test_a_parameter_is_named_before_what_it_spoils(make, batches, device):
    class Break(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            with torch.no_grad():
                model.head.bias.fill_(float("inf"))

    with pytest.raises(FloatingPointError, match=r"the parameter 'head\.bias' before the step"):
        make(Break(), NaNChecker(), device=device).fit(batches)


@DEVICES
def test_the_batch_is_named_before_what_it_spoils(make, batches, device):
    batches[1][1][0] = float("nan")
    with pytest.raises(
        FloatingPointError, match=r"the batch at \.1 is not finite at global_step 2"
    ):
        make(NaNChecker(), device=device).fit(batches)


def test_a_validation_is_watched_too(make, batches):
    batches[9][0][0] = float("nan")
    trainer = make(NaNChecker(), loop=TrainingLoop(max_steps=2))
    with pytest.raises(FloatingPointError, match=r"the batch at \.0 .* validate_0/global_step 2"):
        trainer.fit(batches, batches[9:])
    with pytest.raises(FloatingPointError, match=r"the batch at \.0 .* validate_\d/global_step"):
        trainer.validate(batches[9:])


def test_only_the_first_steps_are_watched(make, batches, net):
    loop = TrainingLoop(max_steps=4, grad_accum_steps=2)
    model = broken(net, Spoil(5))
    trainer = make(NaNChecker(num_steps=2), model=model, loop=loop, check_loss=False)
    trainer.fit(batches)
    assert trainer.global_step == 4
    with pytest.raises(FloatingPointError, match=r"'layers\.1' .* global_step 2"):
        make(NaNChecker(num_steps=2), model=broken(net, Spoil(4)), loop=loop).fit(
            batches, ckpt_path=None
        )


def test_gradients_under_a_loss_scaler_are_its_own(make, batches):
    precision = MixedPrecision(fp16_type="float16", initial_loss_scale=2.0**30)
    trainer = make(NaNChecker(), device="fake", precision=precision)
    trainer.fit(batches)
    assert trainer.global_step == 4


def test_a_healthy_run_is_left_alone(make, batches, tmp_path):
    plain, watched = make(model_dir=tmp_path / "plain"), make(NaNChecker())
    plain.fit(batches)
    watched.fit(batches, batches[:2])
    for before, after in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("num_steps", [0, -1, True, 1.5])
def test_a_count_that_does_not_fit_is_refused(num_steps):
    with pytest.raises(ConfigError, match=r"NaNChecker\.num_steps: expected .*, got "):
        NaNChecker(num_steps)
