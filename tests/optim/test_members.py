"""Schedules whose members are created by callables, also after a failed constructor."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from torch import nn

from modelzoo_trainer import optim
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import OPTIMIZERS, SCHEDULERS, OptimizerFactory
from modelzoo_trainer.optim.composed import ChainedScheduler, ScalePerParamLR, SequentialLR
from modelzoo_trainer.optim.decay import ConstantLR, LinearLR
from modelzoo_trainer.optim.stepwise import MultiplicativeLR

WARM_UP = partial(LinearLR, initial_learning_rate=0.0, end_learning_rate=1.0, total_iters=4)


def test_members_may_be_callables(sgd):
    schedule = SequentialLR(sgd, [WARM_UP, lambda optimizer: ConstantLR(optimizer, 3.0)])
    assert schedule.milestones == [4]
    assert [schedule.value(step) for step in (0, 2, 4)] == [0.0, 0.5, 3.0]
    assert [member.optimizer for member in schedule.members] == [None, None]


def test_a_callable_makes_members_of_each_composed_schedule():
    half = partial(MultiplicativeLR, initial_learning_rate=1.0, coefficient=0.5)
    assert ChainedScheduler(None, [WARM_UP, half]).value(2) == 0.125
    assert ScalePerParamLR(None, WARM_UP).value(2) == 0.5


def test_a_callable_that_makes_something_else_is_refused():
    with pytest.raises(ConfigError, match=r"SequentialLR\.schedulers: 3 is not a schedule"):
        SequentialLR(None, [lambda optimizer: 3])


def test_a_schedule_that_did_not_fit_may_be_bound_to_another_optimizer(sgd):
    schedule = ConstantLR(None, 0.1, None, "b")
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    with pytest.raises(ConfigError, match="no parameter group has one of these tags"):
        schedule.bind(other)
    assert schedule.optimizer is None
    schedule.bind(sgd)
    assert [group["lr"] for group in sgd.param_groups] == [0.5, 0.1]


def test_a_misspelt_argument_of_an_optimizer_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"argument 'wight_decay'\. Did you mean 'weight_decay'"):
        OptimizerFactory(OPTIMIZERS["AdamW"], {"wight_decay": 0.1})


def test_an_optimizer_without_a_learning_rate_gets_none_that_was_not_requested():
    class Plain(torch.optim.Optimizer):
        def __init__(self, params, scale=2.0):
            super().__init__(params, {"scale": scale})

    optimizer = OptimizerFactory(Plain, {"scale": 3.0})(nn.Linear(2, 2))
    assert [group["scale"] for group in optimizer.param_groups] == [3.0]
    with pytest.raises(TypeError, match="lr"):
        OptimizerFactory(Plain, {"lr": 0.1})(nn.Linear(2, 2))


def test_members_need_no_optimizer_in_python() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    names = {"initial_learning_rate": 0.0, "end_learning_rate": 0.2, "total_iters": 2}
    schedule = optim.SequentialLR(
        optimizer,
        schedulers=[
            optim.LinearLR(**names),
            optim.ChainedScheduler(
                schedulers=[
                    optim.LinearLR(None, 0.2, 0.0, 4),
                    optim.ConstantLR(learning_rate=0.5),
                ]
            ),
        ],
    )
    seen = []
    for _ in range(5):
        seen.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert seen == pytest.approx([0.0, 0.1, 0.2, 0.15, 0.1])


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_every_schedule_may_be_made_without_an_optimizer(name: str) -> None:
    parameters = list(inspect.signature(SCHEDULERS[name]).parameters.values())
    assert parameters[0].name == "optimizer"
    required = [one.name for one in parameters[1:] if one.default is one.empty]
    if not required:
        assert SCHEDULERS[name]().optimizer is None
        return
    with pytest.raises(TypeError, match=r"__init__\(\)") as caught:
        SCHEDULERS[name]()
    found = [one for one in ("optimizer", *required) if f"'{one}'" in str(caught.value)]
    assert found == required
