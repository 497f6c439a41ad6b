"""The backward pass that has weights and losses travel beside gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from backends.parallel.ddp import GradientWindow, LossWeighting


def weighting() -> tuple[LossWeighting, Tensor]:
    torch.manual_seed(0)
    return LossWeighting(nn.Linear(3, 1).double()), torch.ones(2, 3, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_weights_arrive_beside_gradients_that_are_those_of_torch(shape) -> None:
    model, inputs = weighting()
    window = GradientWindow(model)
    for weight, noted in ((1.0, None), (1.0, torch.tensor(3.0)), (0.5, None), (0.5, None)):
        window.reset()
        model.model.zero_grad()
        loss = model(inputs).mean().reshape(shape)
        [expected] = torch.autograd.grad(loss, [model.model.weight], retain_graph=True)
        window.add(weight, noted)
        window.backward(loss)
        assert torch.equal(model.model.weight.grad, expected)
        assert [float(value) for value in window.sums()] == [weight, 3.0 * (noted is not None)]


def test_a_window_sums_its_batches_and_begins_anew() -> None:
    model, inputs = weighting()
    window = GradientWindow(model)
    for weights, total in (([1.0, 1.0, 0.25], 2.25), ([1.0], 1.0)):
        for weight in weights:
            window.add(weight)
            window.backward(model(inputs).mean())
        assert float(window.sums()[0]) == total
        window.reset()
        assert model.probe.grad is None


def test_a_backward_pass_of_nothing_noted_leaves_the_window_alone() -> None:
    model, inputs = weighting()
    GradientWindow(model).backward(model(inputs).mean())
    assert model.probe.grad is None
    assert model.model.weight.grad is not None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda found: found.flatten(), "scalar outputs"),
        (lambda found: found.mean().detach(), "does not require grad"),
        (lambda found: found.mean().to(torch.complex128), "real scalar"),
    ],
    ids=["several", "constant", "complex"],
)
def test_a_loss_that_cannot_be_differentiated_is_refused_as_by_torch(make, message) -> None:
    model, inputs = weighting()
    window = GradientWindow(model)
    for make_loss in (torch.mean, make):  # also after one that can be
        window.add(1.0)
        if make_loss is make:
            with pytest.raises(RuntimeError, match=message):
                window.backward(make_loss(model(inputs)))
        else:
            window.backward(make_loss(model(inputs)))


def test_a_loss_of_another_type_has_a_gradient_of_its_type() -> None:
    model, inputs = weighting()
    window = GradientWindow(model)
    for dtype in (torch.float64, torch.float32, torch.float64):
        model.model.zero_grad()
        window.add(1.0)
        window.backward(model(inputs).mean().to(dtype))
        assert torch.equal(model.model.weight.grad, torch.ones_like(model.model.weight))
