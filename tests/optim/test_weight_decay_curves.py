"""Weight decay schedules with the formulas of learning rate schedules."""

from __future__ import annotations

import math

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import SCHEDULERS, WeightDecayScheduler, scheduler_class
from modelzoo_trainer.optim.composed import SequentialWD

FORMULAS = [
    (
        "PolynomialWD",
        {"initial_val": 0.9, "end_val": 0.1, "total_iters": 20, "power": 2.0},
        lambda s: 0.1 + 0.8 * (1 - min(s, 20) / 20) ** 2,
    ),
    (
        "ExponentialWD",
        {"initial_val": 0.9, "total_iters": 20, "decay_rate": 0.5, "staircase": True},
        lambda s: 0.9 / 2 ** (s // 20),
    ),
    (
        "InverseExponentialTimeDecayWD",
        {"initial_val": 0.9, "step_exponent": 2, "total_iters": 20, "decay_rate": 0.5},
        lambda s: 0.9 / (1 + 0.5 * s * s / 20),
    ),
    (
        "InverseSquareRootDecayWD",
        {"initial_val": 0.9, "scale": 2.0, "warmup_steps": 10},
        lambda s: 1.8 / math.sqrt(max(10, s)),
    ),
    ("StepWD", {"initial_val": 0.9, "step_size": 7, "gamma": 0.5}, lambda s: 0.9 / 2 ** (s // 7)),
    (
        "MultiStepWD",
        {"initial_val": 0.9, "gamma": 0.5, "milestones": [3, 30]},
        lambda s: 0.9 if s < 3 else 0.45 if s < 30 else 0.225,
    ),
    (
        "PiecewiseConstantWD",
        {"vals": [0.5, 0.7, 0.2], "milestones": [3, 30]},
        lambda s: 0.5 if s < 3 else 0.7 if s < 30 else 0.2,
    ),
    ("MultiplicativeWD", {"initial_val": 0.9, "coefficient": 0.95}, lambda s: 0.9 * 0.95**s),
    (
        "CosineAnnealingWD",
        {"initial_val": 0.9, "T_max": 20, "eta_min": 0.1},
        lambda s: 0.1 + 0.4 * (1 + math.cos(math.pi * s / 20)),
    ),
    (
        "CosineAnnealingWarmRestartsWD",
        {"initial_val": 0.9, "T_0": 7, "eta_min": 0.1},
        lambda s: 0.1 + 0.4 * (1 + math.cos(math.pi * (s % 7) / 7)),
    ),
    (
        "CyclicWD",
        {"base_val": 0.1, "max_val": 0.9, "step_size_up": 5},
        lambda s: 0.1 + 0.16 * (s % 10 if s % 10 <= 5 else 10 - s % 10),
    ),
    (
        "OneCycleWD",
        {"initial_val": 0.1, "max_val": 0.9, "total_steps": 21, "pct_start": 11 / 21}
        | {"final_div_factor": 2.0, "anneal_strategy": "linear"},
        lambda s: 0.1 + 0.08 * s if s <= 10 else max(0.9 - 0.085 * (s - 10), 0.05),
    ),
]


@pytest.mark.parametrize(("name", "arguments", "formula"), FORMULAS)
def test_a_schedule_of_weight_decay_follows_its_formula(name, arguments, formula):
    schedule = scheduler_class(name)(None, **arguments)
    given = [schedule.value(step) for step in range(61)]
    assert given == pytest.approx([formula(step) for step in range(61)], rel=1e-12)


def test_every_schedule_of_weight_decay_is_tested_somewhere():
    elsewhere = {"ConstantWD", "LinearWD", "CosineDecayWD", "SequentialWD", "ChainedWD"}
    elsewhere |= {"LambdaWD"}
    known = {name for name, cls in SCHEDULERS.items() if issubclass(cls, WeightDecayScheduler)}
    assert known - elsewhere == {name for name, _, _ in FORMULAS}


def test_it_writes_weight_decay_and_not_the_learning_rate(sgd):
    schedule = scheduler_class("StepWD")(sgd, 0.8, 1, 0.5, param_group_tags="b")
    schedule.step()
    assert [group["weight_decay"] for group in sgd.param_groups] == [0.25, 0.4]
    assert [group["lr"] for group in sgd.param_groups] == [0.5, 0.5]
    assert schedule.get_last_value() == [0.4]


def test_a_chain_multiplies_what_becomes_of_its_members():
    members = [scheduler_class("StepWD")(None, 0.8, 2, 0.5) for _ in range(2)]
    chain = scheduler_class("ChainedWD")(None, members)
    assert [chain.value(step) for step in (0, 1, 2, 4)] == pytest.approx([0.8, 0.8, 0.2, 0.05])


def test_it_is_a_member_with_its_length():
    first = scheduler_class("PolynomialWD")(None, 0.9, 0.1, 20)
    second = scheduler_class("MultiplicativeWD")(None, 0.5, 0.5)
    sequence = SequentialWD(None, [first, second])
    assert sequence.milestones == [20]
    assert [sequence.value(step) for step in (0, 20, 21)] == pytest.approx([0.9, 0.5, 0.25])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("PolynomialWD", (0.9, 0.1, 0), r"^PolynomialWD\.total_iters: expected [^,]*> 0.*, got 0"),
        ("StepWD", (0.9, -1, 0.5), r"^StepWD\.step_size: expected .*, got -1"),
        ("MultiStepWD", (0.9, 0.5, [2, 1]), r"^MultiStepWD\.milestones: expected .*, got \[2, 1\]"),
        (
            "PiecewiseConstantWD",
            ([0.1], [1]),
            r"^PiecewiseConstantWD\.vals has 1 .* 1 milestones need 2",
        ),
        ("StepWD", (-0.9, 1, 0.5), r"^StepWD\.initial_val: expected [^,]*>= 0.*, got -0\.9"),
        ("PolynomialWD", (0.9, -0.1, 5), r"^PolynomialWD\.end_val: expected .*, got -0\.1"),
        (
            "PiecewiseConstantWD",
            ([0.1, -1.0], [1]),
            r"^PiecewiseConstantWD\.vals\[1\]: expected .*, got -1",
        ),
        ("CyclicWD", (-0.1, 0.9), r"^CyclicWD\.base_val: expected .*, got -0\.1"),
        ("CyclicWD", (0.1, -0.9), r"^CyclicWD\.max_val: expected .*, got -0\.9"),
        ("OneCycleWD", (0.1, 0.9, 10, 2.0), r"^OneCycleWD\.pct_start=2\.0"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused_in_its_own_words(name, arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        scheduler_class(name)(None, *arguments)
    assert "LR" not in str(caught.value)
