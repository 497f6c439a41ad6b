"""The state that an optimizer will have is known before its first step, or reported as unknown."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

from modelzoo_trainer import Checkpoint
from modelzoo_trainer.core.parts.optimizer_facts import check_shapes
from modelzoo_trainer.errors import CheckpointMismatch
from modelzoo_trainer.optim import OPTIMIZERS
from modelzoo_trainer.optim.first_state import bytes_to_come, first_states
from modelzoo_trainer.optim.optimizer import GroupOptimizer
from tests.doubles import TinyModel, make_trainer, tiny_batches

FLOAT = 4
OTHERWISE = {"LBFGS", "Optimizer", "SparseAdam"}
TORCHS = [
    *(one.__name__ for one in vars(optim).values() if isinstance(one, type)),
    *("SGD, momentum", "Adam, amsgrad", "RMSprop, all"),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "SGD, momentum": {"momentum": 0.9},
    "Adam, amsgrad": {"amsgrad": True},
    "RMSprop, all": {"momentum": 0.9, "centered": True},
}


class Own(optim.Optimizer):
    """A user's optimizer: a momentum, the means of the rows of a matrix, and a count."""

    def __init__(self, params: Any, keep: float = 0.9) -> None:
        super().__init__(params, {"lr": 0.1, "keep": keep})
        self.num_steps = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure
        self.num_steps[0] += 1
        random.random(), np.random.random(), torch.rand(())
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._move(param, self.state[param], group)

    def _move(self, param: Tensor, state: Any, group: Any) -> None:
        if not state:
            state |= {"step": 0, "average": torch.zeros_like(param, dtype=torch.bfloat16)}
            if param.dim() == 2:
                state["rows"] = [param.new_zeros(param.shape[0])]
        state["step"] += 1
        state["average"].lerp_(param.grad.to(torch.bfloat16), 1 - group["keep"])
        param.sub_(state["average"], alpha=group["lr"])


class Reading(Own):
    """Reads a value on the host, which a meta tensor does not have."""

    def _move(self, param: Tensor, state: Any, group: Any) -> None:
        if param.grad.norm().item() > 0:
            super()._move(param, state, group)


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5, dtype=dtype), nn.Linear(5, 4, dtype=dtype))


def size_after_a_step(model: nn.Module, optimizer: optim.Optimizer) -> int:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return size_of(optimizer)


def size_of(optimizer: optim.Optimizer) -> int:
    values = [one for state in optimizer.state.values() for one in state.values()]
    values = [part for one in values for part in (one if isinstance(one, list) else [one])]
    return sum(one.nbytes for one in values if isinstance(one, Tensor))


@pytest.mark.parametrize("name", [name for name in TORCHS if name not in OTHERWISE])
def test_the_state_of_torchs_own_optimizers_is_known(name: str) -> None:
    model = model_of(torch.float64)
    params = [param for param in model.parameters() if name != "Muon" or param.dim() == 2]
    optimizer = getattr(optim, name.partition(",")[0])(params, **SETTINGS.get(name, {}))
    before, to_come = size_of(optimizer), bytes_to_come(optimizer)
    assert to_come is not None
    rest = size_after_a_step(model, optimizer) - before - to_come
    assert 0 <= rest <= len(params) * 3 * 8  # counts of steps


def test_what_needs_a_closure_or_has_another_kind_of_gradient_is_unknown_or_said() -> None:
    assert bytes_to_come(optim.LBFGS(model_of().parameters())) is None
    table = nn.Embedding(7, 3, sparse=True)
    assert bytes_to_come(optim.SparseAdam(table.parameters())) == 2 * 7 * 3 * FLOAT


def test_an_optimizer_that_says_nothing_is_measured() -> None:
    model = model_of()
    optimizer = Own(model.parameters())
    matrices, vectors = 6 * 5 + 5 * 4, 5 + 4
    assert bytes_to_come(optimizer) == 2 * (matrices + vectors) + FLOAT * (5 + 4)
    assert size_after_a_step(model, optimizer) == 2 * (matrices + vectors) + FLOAT * (5 + 4)
    assert bytes_to_come(optimizer) == 0


def test_measuring_changes_nothing() -> None:
    model = model_of()
    optimizer = Own(model.parameters())
    optimizer.register_step_pre_hook(lambda *given: pytest.fail("a hook was called"))
    before = copy.deepcopy(optimizer.state_dict()), [*map(torch.clone, model.parameters())]
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    bytes_to_come(optimizer)
    drawn = random.random(), np.random.random(), torch.rand(()).item()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    assert drawn == (random.random(), np.random.random(), torch.rand(()).item())
    assert optimizer.num_steps == [0]
    assert optimizer.state == {}
    assert optimizer.state_dict() == before[0]
    assert all(param.grad is None for param in model.parameters())
    assert all(map(torch.equal, model.parameters(), before[1]))


def test_a_copy_to_measure_takes_no_memory() -> None:
    class Slow(Own):
        def __init__(self, params: Any) -> None:
            params = list(params)
            super().__init__(params)
            self.slow = [param.detach().clone() for param in params]
            self.seen: list[Tensor] = []

        def _move(self, param: Tensor, state: Any, group: Any) -> None:
            assert all(one.is_meta for one in (param, *self.slow))
            super()._move(param, state, group)

    optimizer = Slow(model_of().parameters())
    assert bytes_to_come(optimizer) == bytes_to_come(Own(model_of().parameters()))
    assert not any(one.is_meta for one in optimizer.slow)


def test_a_step_of_the_users_is_not_tried_in_one_of_several_processes() -> None:
    assert bytes_to_come(Own(model_of().parameters()), is_alone=False) is None
    assert bytes_to_come(optim.Muon([nn.Parameter(torch.ones(2, 3))]), is_alone=False)


def test_a_state_that_cannot_be_measured_is_unknown() -> None:
    assert bytes_to_come(Reading(model_of().parameters())) is None


def test_a_saved_state_that_is_another_one_is_unknown() -> None:
    class Wrapped(Own):
        def state_dict(self) -> dict[str, Any]:
            return {"inner": 3}

    assert bytes_to_come(Wrapped(model_of().parameters())) is None


def test_what_an_optimizer_says_is_taken_instead_of_a_step() -> None:
    class Saying(Reading):
        def first_state(self, param: Tensor, group: Any) -> dict[str, Any]:
            assert param.is_meta
            return {"step": 0, "average": torch.zeros_like(param, dtype=torch.bfloat16)}

    saying = Saying(model_of().parameters())
    assert bytes_to_come(saying, is_alone=False) == 2 * (6 * 5 + 5 * 4 + 5 + 4)


@pytest.mark.parametrize("base", [optim.AdamW, OPTIMIZERS["AdamW"]])
def test_a_derived_optimizer_has_the_state_of_its_base(base: Any) -> None:
    class Derived(base):
        pass

    assert bytes_to_come(Derived(nn.Linear(8, 8, bias=False).parameters())) == 2 * 8 * 8 * FLOAT


@pytest.mark.parametrize("base", [optim.AdamW, OPTIMIZERS["AdamW"]])
def test_a_step_that_is_overridden_may_have_more_state_than_its_base(base: Any) -> None:
    class More(base):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param].setdefault("slow", param.clone())

    params = list(nn.Linear(8, 8, bias=False).parameters())
    assert bytes_to_come(More(params)) == 3 * 8 * 8 * FLOAT + FLOAT  # and the count of steps


def test_an_update_that_keeps_its_own_state_is_measured() -> None:
    class Signs(GroupOptimizer):
        def _update(self, group: Any, params: Any, grads: Any) -> None:
            for param, grad in zip(params, grads, strict=True):
                self.state[param]["last"] = torch.sign(grad)
                param.sub_(self.state[param]["last"], alpha=group["lr"])

    assert bytes_to_come(Signs(nn.Linear(8, 8, bias=False), lr=0.1)) == 8 * 8 * FLOAT


def test_parameters_that_are_not_trained_have_no_state() -> None:
    model = model_of()
    model[0].requires_grad_(False)
    for optimizer in (Own(model.parameters()), optim.AdamW(model.parameters())):
        states = first_states(optimizer, is_alone=True)
        assert states is not None
        assert [*states] == [*model[1].parameters()]


def test_a_run_with_an_optimizer_of_unknown_state_reports_it_and_trains(tmp_path, caplog) -> None:
    caplog.set_level("INFO", "modelzoo_trainer")
    for kind in (Reading, Own):
        make = lambda model, kind=kind: kind(model.parameters())  # noqa: E731
        settings = {"checkpoint": Checkpoint(steps=2), "max_steps": 2}
        trainer = make_trainer(tmp_path / kind.__name__, optimizer=make, **settings)
        trainer.fit(tiny_batches(2))
        assert trainer.global_step == 2
    [line] = [text for text in caplog.messages if "free space was checked" in text]
    assert "state of Reading" in line
    assert "first_state(param, group)" in line


def test_a_saved_state_of_another_shape_is_refused_whatever_its_key() -> None:
    model = TinyModel()
    optimizer = Own(model.parameters())
    size_after_a_step(model, optimizer)
    saved = optimizer.state_dict()
    check_shapes(Own(model.parameters()), saved, None)
    saved["state"][0]["average"] = torch.zeros(1, 3, dtype=torch.bfloat16)
    with pytest.raises(CheckpointMismatch, match=r"average of parameter 0 has the shape \(1, 3\)"):
        check_shapes(Own(model.parameters()), saved, None)
