"""Optimizers made fused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from backends import Backend, fast_step
from backends.fast_step import fuse_optimizer
from backends.sync_guard import SyncGuard

CPU = torch.device("cpu")
SWITCHED = [SGD, Adam, AdamW, Adagrad]


def weight_and(cls: type[Optimizer], **options: Any) -> tuple[nn.Parameter, Optimizer]:
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    return weight, cls([weight], lr=0.1, **options)  # type: ignore[call-arg]


def train(weight: nn.Parameter, optimizer: Optimizer, num_steps: int = 5) -> Tensor:
    for _ in range(num_steps):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    return weight.detach().clone()


@pytest.mark.parametrize("cls", SWITCHED)
def test_a_switched_optimizer_computes_the_same(cls: type[Optimizer]) -> None:
    expected = train(*weight_and(cls))
    weight, optimizer = weight_and(cls)
    assert fuse_optimizer(optimizer, CPU)
    torch.testing.assert_close(train(weight, optimizer), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cls", SWITCHED)
def test_a_loss_scaler_reads_nothing_with_a_switched_optimizer(cls: type[Optimizer]) -> None:
    weight, optimizer = weight_and(cls)
    fuse_optimizer(optimizer, CPU)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    guard = SyncGuard()
    guard.arm()
    try:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    finally:
        guard.disarm()
    assert weight.detach()[0] < 1.0


def test_an_overflow_leaves_the_weights_alone() -> None:
    weight, optimizer = weight_and(AdamW)
    fuse_optimizer(optimizer, CPU)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((weight * torch.tensor([float("inf"), 1.0, 1.0])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1.0, -2.0, 3.0]
    assert scaler.get_scale() == 2.0


def test_a_momentum_whose_first_step_overflowed_begins_at_zero() -> None:
    weight, optimizer = weight_and(SGD, momentum=0.9)
    fuse_optimizer(optimizer, CPU)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * torch.tensor([factor, 1.0, 1.0])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.state[weight]["momentum_buffer"].tolist() == [1.0, 1.0, 1.0]
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9, -2.1, 2.9]))


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_momentum_may_begin_later_for_some_parameters(nesterov: bool) -> None:
    runs = []
    for fused_ in (True, False):
        first, late = (nn.Parameter(torch.tensor([value])) for value in (1.0, 2.0))
        optimizer = SGD([first, late], lr=0.1, momentum=0.9, nesterov=nesterov)
        assert not fused_ or fuse_optimizer(optimizer, CPU)
        for step in range(4):
            optimizer.zero_grad()
            ((first * first).sum() + (late * late).sum() * (step > 1)).backward()
            late.grad = late.grad if step > 1 else None
            optimizer.step()
        runs.append(torch.cat((first.detach(), late.detach())))
    torch.testing.assert_close(*runs)


def test_a_dampened_momentum_is_left_alone() -> None:
    _, optimizer = weight_and(SGD, momentum=0.9, dampening=0.1)
    assert not fuse_optimizer(optimizer, CPU)


@pytest.mark.parametrize("choice", [{"foreach": True}, {"foreach": False}, {"fused": False}])
def test_what_the_user_chose_stays(choice: dict[str, bool]) -> None:
    _, optimizer = weight_and(AdamW, **choice)
    assert not fuse_optimizer(optimizer, CPU)
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


def test_an_optimizer_without_a_kernel_is_left_alone() -> None:
    _, optimizer = weight_and(RMSprop)
    assert not fuse_optimizer(optimizer, CPU)


def test_a_device_without_a_kernel_is_left_alone() -> None:
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch has the kernels")
    _, optimizer = weight_and(AdamW)
    assert not fuse_optimizer(optimizer, torch.device("cuda"))


def test_a_subclass_with_a_step_of_its_own_is_left_alone() -> None:
    class Own(AdamW):
        def step(self, closure: Any = None) -> Any:
            return None

    class Renamed(AdamW):
        pass

    assert not fuse_optimizer(weight_and(Own)[1], CPU)
    assert fuse_optimizer(weight_and(Renamed)[1], CPU)


def test_complex_parameters_are_left_alone() -> None:
    optimizer = Adam([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    assert not fuse_optimizer(optimizer, CPU)


def test_a_group_that_is_added_later_is_fused_too() -> None:
    _, optimizer = weight_and(Adam)
    fuse_optimizer(optimizer, CPU)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]


@pytest.mark.parametrize("cls", SWITCHED)
def test_a_checkpoint_does_not_depend_on_it(cls: type[Optimizer]) -> None:
    weight, optimizer = weight_and(cls)
    fuse_optimizer(optimizer, CPU)
    train(weight, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    assert state["param_groups"][0]["fused"] is None
    assert optimizer.param_groups[0]["fused"] is True
    plain_weight, plain = weight_and(cls)
    plain.load_state_dict(state)
    assert not plain.param_groups[0]["fused"]
    plain_weight.data.copy_(weight.data)
    torch.testing.assert_close(train(plain_weight, plain), train(weight, optimizer))


@pytest.mark.parametrize("cls", SWITCHED)
def test_it_survives_the_load_of_a_checkpoint_from_elsewhere(cls: type[Optimizer]) -> None:
    plain_weight, plain = weight_and(cls)
    train(plain_weight, plain, 2)
    weight, optimizer = weight_and(cls)
    fuse_optimizer(optimizer, CPU)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert optimizer.param_groups[0]["fused"] is True
    weight.data.copy_(plain_weight.data)
    torch.testing.assert_close(train(weight, optimizer), train(plain_weight, plain))


def test_counts_of_steps_move_to_where_the_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_step, "_has_kernel", lambda kernel, device: True)
    weight = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = Adagrad([weight])
    assert optimizer.state[weight]["step"].device.type == "cpu"
    assert fuse_optimizer(optimizer, torch.device("meta"))
    assert optimizer.state[weight]["step"].device.type == "meta"


def test_a_model_with_sparse_gradients_keeps_its_optimizer(open_backend: Any) -> None:
    backend: Backend = open_backend("host-accelerator")
    model = backend.prepare_model(nn.Embedding(4, 2, sparse=True))
    optimizer = backend.prepare_optimizer(SGD(model.parameters(), lr=0.1))
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["fused"] is None


def test_an_accelerator_switches_by_itself(open_backend: Any) -> None:
    backend: Backend = open_backend("host-accelerator")
    model = backend.prepare_model(nn.Linear(2, 2))
    optimizer = backend.prepare_optimizer(AdamW(model.parameters()))
    assert optimizer.param_groups[0]["fused"] is True
