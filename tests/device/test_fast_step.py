import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from backends.fast_step import plain_step, plain_zero_grad


@pytest.fixture
def parameter():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 0.5)
    return parameter


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_a_plain_step_is_the_same_update(kind):
    ours, stock = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizers = kind([ours], lr=0.1), kind([stock], lr=0.1)
    for step in range(3):
        ours.grad, stock.grad = torch.full((3,), 1.0 + step), torch.full((3,), 1.0 + step)
        plain_step(optimizers[0])
        optimizers[1].step()
    assert torch.equal(ours, stock)


def test_hooks_of_an_optimizer_are_called(parameter):
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    called = []
    optimizer.register_step_pre_hook(lambda *args: called.append("before"))
    optimizer.register_step_post_hook(lambda *args: called.append("after"))
    plain_step(optimizer)
    assert called == ["before", "after"]


def test_hooks_of_all_optimizers_are_called(parameter):
    called = []
    handle = register_optimizer_step_post_hook(lambda *args: called.append(1))
    try:
        plain_step(torch.optim.SGD([parameter], lr=0.1))
    finally:
        handle.remove()
    assert called == [1]


def test_a_profiler_sees_the_step(parameter):
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with torch.autograd.profiler.profile() as profile:
        plain_step(optimizer)
    assert any("SGD.step" in event.name for event in profile.function_events)


def test_a_scheduler_of_torch_knows_that_a_step_was_taken(parameter):
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    plain_step(optimizer)
    scheduler.step()  # would warn, which is an error here
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]


def test_an_optimizers_own_methods_are_called(parameter):
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            self.stepped = True

        def zero_grad(self, set_to_none=True):
            self.cleared = True

    optimizer = Own([parameter], lr=0.1)
    plain_step(optimizer)
    plain_zero_grad(optimizer)
    assert optimizer.stepped
    assert optimizer.cleared
    assert parameter.grad is not None


def test_gradients_are_dropped(parameter):
    plain_zero_grad(torch.optim.SGD([parameter], lr=0.1))
    assert parameter.grad is None
