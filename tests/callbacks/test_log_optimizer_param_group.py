import pytest
import torch

from modelzoo_trainer import Callback, ConfigError
from modelzoo_trainer.callbacks import LogOptimizerParamGroup


def two_groups(model):
    groups = [
        {"params": model.layers.parameters()},
        {"params": model.head.parameters(), "lr": 0.01, "extra": 7},
    ]
    return torch.optim.SGD(groups, lr=0.1)


def test_one_group_has_its_number_as_well(make, batches, history):
    make(LogOptimizerParamGroup("lr"), log_steps=2).fit(batches)
    assert history.of("lr/0") == [(2, 0.1), (4, 0.1)]


def test_every_group_that_has_a_key_is_logged(make, batches, history):
    make(LogOptimizerParamGroup(["lr", "extra"]), optimizer=two_groups, max_steps=1).fit(batches)
    assert history.of("lr/0") == [(1, 0.1)]
    assert history.of("lr/1") == [(1, 0.01)]
    assert history.of("extra/1") == [(1, 7)]
    assert history.of("extra/0") == []


class Halve(Callback):
    """Change the learning rate in place after the step, as a scheduler does."""

    def on_after_optimizer_zero_grad(self, trainer, model, optimizer):
        optimizer.param_groups[0]["lr"].mul_(0.5)


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_a_tensor_is_logged_as_it_was_in_the_step(make, batches, history, device):
    make(
        LogOptimizerParamGroup("lr"),
        Halve(),
        device=device,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=torch.tensor(1.0)),
        max_steps=3,
    ).fit(batches)
    assert history.of("lr/0") == [(1, 1.0), (2, 0.5), (3, 0.25)]


def test_a_key_that_no_group_has_is_refused_with_a_suggestion(make):
    with pytest.raises(
        ConfigError, match=r"in no parameter group of SGD\. Did you mean 'momentum'"
    ):
        make(LogOptimizerParamGroup("momentun"))


def test_a_value_that_is_not_a_number_is_refused(make):
    def adam(model):
        return torch.optim.Adam(model.parameters())

    with pytest.raises(ConfigError, match=r"'betas' is \(0.9, 0.999\) .* only numbers"):
        make(LogOptimizerParamGroup("betas"), optimizer=adam)


def test_a_trainer_without_an_optimizer_validates(make, batches, history):
    make(LogOptimizerParamGroup("lr"), optimizer=None).validate(batches)
    assert history.of("lr/0") == []
