"""Models that are moved: their parameters are the same objects, tied as they were."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from backends import BackendError
from backends.placement import move_model, swap_model

META = torch.device("meta")


@pytest.fixture(autouse=True)
def _flag() -> Iterator[None]:
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def swaps() -> bool:
    return bool(torch.__future__.get_swap_module_params_on_conversion())


class Tied(nn.Module):
    """Two layers of one weight, each with a bias and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 3)
        self.head.weight = self.embed.weight


def kinds(model: nn.Module) -> set[str]:
    return {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}


def test_parameters_are_the_same_objects_on_the_device() -> None:
    model = Tied()
    before = list(model.parameters())
    swap_model(model, META)
    assert kinds(model) == {"meta"}
    assert [id(param) for param in model.parameters()] == [id(param) for param in before]
    assert all(type(param) is nn.Parameter for param in before)


def test_a_model_that_is_moved_as_torch_does_it_gets_others() -> None:
    model = Tied()
    before = model.norm.weight
    move_model(model, META)
    assert model.norm.weight is not before


@pytest.mark.parametrize("move", [move_model, swap_model])
def test_ties_stay(move: Any) -> None:
    model = Tied()
    move(model, META)
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == 5


def test_an_optimizer_that_was_made_before_has_the_parameters_still() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    swap_model(model, META)
    [group] = optimizer.param_groups
    assert [id(param) for param in group["params"]] == [id(param) for param in model.parameters()]
    assert {param.device.type for param in group["params"]} == {"meta"}


def test_what_needs_no_gradient_still_needs_none() -> None:
    model = Tied()
    model.embed.bias.requires_grad_(False)
    swap_model(model, META)
    assert [param.requires_grad for param in model.parameters()] == [True, False, True, True, True]


def test_gradients_that_are_there_move_as_well() -> None:
    model = nn.Linear(2, 3)
    model(torch.ones(1, 2)).sum().backward()
    swap_model(model, META)
    assert model.weight.grad.device.type == "meta"


def test_a_model_that_is_there_already_stays() -> None:
    model = nn.Linear(2, 3)
    expected = model.weight.tolist()
    swap_model(model, torch.device("cpu"))
    assert model.weight.tolist() == expected


@pytest.mark.parametrize("before", [False, True])
def test_the_switch_of_torch_is_as_it_was(before: bool) -> None:
    torch.__future__.set_swap_module_params_on_conversion(before)
    swap_model(nn.Linear(2, 3), META)
    assert swaps() is before


# ---- what is refused


def test_a_parameter_that_is_referred_to_weakly_is_refused() -> None:
    model = nn.Linear(2, 3)
    reference = weakref.ref(model.weight)
    with pytest.raises(
        BackendError,
        match=r"cannot be moved to meta: .*Couldn't swap Linear\.weight.*a function",
    ):
        swap_model(model, META)
    assert reference() is model.weight
    assert not swaps()


def test_a_parameter_that_a_gradient_is_pending_for_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    loss = model(torch.ones(1, 2)).sum()
    with pytest.raises(BackendError, match=r"cannot be moved to meta: .*Couldn't swap Linear\.wei"):
        swap_model(model, META)
    assert loss.requires_grad
    assert not swaps()


def test_the_cause_of_a_refusal_is_kept() -> None:
    model = nn.Linear(2, 3)
    reference = weakref.ref(model.weight)
    with pytest.raises(BackendError) as caught:
        swap_model(model, META)
    assert type(caught.value.__cause__) is RuntimeError
    assert reference() is not None


def test_a_model_moves_once_the_gradient_is_no_more_pending() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    del loss
    swap_model(model, META)
    assert kinds(model) == {"meta"}


class Failing(nn.Module):
    """A module that cannot be moved."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), LookupError("no such swap")])
def test_other_errors_come_through(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)) as caught:
        swap_model(nn.Sequential(Failing(error)), META)
    assert caught.value is error
    assert not swaps()
