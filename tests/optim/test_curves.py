"""Every schedule compared with its closed formula, and with torch's if there is one."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as theirs

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import SCHEDULERS, LRScheduler, scheduler_class
from modelzoo_trainer.optim.stepwise import LambdaLR

NUM_STEPS = 60
LINE = {"initial_learning_rate": 0.9, "end_learning_rate": 0.1, "total_iters": 20}
WD_LINE = {"initial_val": 0.9, "end_val": 0.1, "total_iters": 20}


def line(step):
    return 0.1 + 0.8 * (1 - min(step, 20) / 20)


def half_cosine(step):
    return 0.1 + 0.8 * (1 + math.cos(math.pi * min(step, 20) / 20)) / 2


FORMULAS = [
    ("ConstantLR", {"learning_rate": 0.3}, lambda s: 0.3),
    ("ConstantWD", {"val": 0.3}, lambda s: 0.3),
    ("LinearLR", LINE, line),
    ("LinearWD", WD_LINE, line),
    (
        "LinearLR",
        LINE | {"cycle": True},
        lambda s: 0.1 + 0.8 * (1 - s / (20 * math.ceil((s + 1) / 20))),
    ),
    ("PolynomialLR", LINE, line),
    (
        "PolynomialLR",
        LINE | {"power": 2.5},
        lambda s: 0.1 + 0.8 * (1 - min(s, 20) / 20) ** 2.5,
    ),
    (
        "PolynomialLR",
        LINE | {"power": 2.0, "cycle": True},
        lambda s: 0.1 + 0.8 * (1 - s / (20 * math.ceil((s + 1) / 20))) ** 2,
    ),
    ("CosineDecayLR", LINE, half_cosine),
    ("CosineDecayWD", WD_LINE, half_cosine),
    (
        "ExponentialLR",
        {"initial_learning_rate": 0.9, "total_iters": 20, "decay_rate": 0.5},
        lambda s: 0.9 * math.exp(s / 20 * math.log(0.5)),
    ),
    (
        "ExponentialLR",
        {"initial_learning_rate": 0.9, "total_iters": 20, "decay_rate": 0.5, "staircase": True},
        lambda s: 0.9 / (1 if s < 20 else 2 if s < 40 else 4 if s < 60 else 8),
    ),
    (
        "InverseExponentialTimeDecayLR",
        {
            "initial_learning_rate": 0.9,
            "step_exponent": 2,
            "total_iters": 20,
            "decay_rate": 0.5,
        },
        lambda s: 0.9 / (1 + 0.5 * s * s / 20),
    ),
    (
        "InverseExponentialTimeDecayLR",
        {
            "initial_learning_rate": 0.9,
            "step_exponent": 1,
            "total_iters": 20,
            "decay_rate": 0.5,
            "staircase": True,
        },
        lambda s: 0.9 / (1 + 0.5 * (s // 20)),
    ),
    (
        "InverseSquareRootDecayLR",
        {"initial_learning_rate": 0.9, "scale": 2.0, "warmup_steps": 10},
        lambda s: 1.8 / math.sqrt(10 if s < 10 else s),
    ),
    ("InverseSquareRootDecayLR", {}, lambda s: 1 / math.sqrt(max(s, 1))),
    (
        "StepLR",
        {"initial_learning_rate": 0.9, "step_size": 7, "gamma": 0.5},
        lambda s: 0.9 / 2 ** (s // 7),
    ),
    (
        "MultiStepLR",
        {"initial_learning_rate": 0.9, "gamma": 0.5, "milestones": [3, 30]},
        lambda s: 0.9 if s < 3 else 0.45 if s < 30 else 0.225,
    ),
    (
        "PiecewiseConstantLR",
        {"learning_rates": [0.5, 0.7, 0.2], "milestones": [3, 30]},
        lambda s: 0.5 if s < 3 else 0.7 if s < 30 else 0.2,
    ),
    (
        "MultiplicativeLR",
        {"initial_learning_rate": 0.9, "coefficient": 0.95},
        lambda s: 0.9 * math.prod([0.95] * s),
    ),
    (
        "CosineAnnealingLR",
        {"initial_learning_rate": 0.9, "T_max": 20, "eta_min": 0.1},
        lambda s: 0.1 + 0.4 * (1 + math.cos(math.pi * s / 20)),
    ),
]


@pytest.mark.parametrize(("name", "arguments", "formula"), FORMULAS)
def test_a_schedule_follows_its_formula_at_every_step(name, arguments, formula):
    schedule = scheduler_class(name)(None, **arguments)
    given = [schedule.value(step) for step in range(NUM_STEPS + 1)]
    assert given == pytest.approx([formula(step) for step in range(NUM_STEPS + 1)], rel=1e-12)


START = {"initial_learning_rate": 0.9}
CYCLE = {"base_lr": 0.1, "max_lr": 0.9, "step_size_up": 7, "step_size_down": 5}
ONE_CYCLE = {"max_lr": 0.9, "total_steps": NUM_STEPS}
THEIRS = [
    ("StepLR", START | {"step_size": 7, "gamma": 0.5}, "StepLR", {"step_size": 7, "gamma": 0.5}),
    (
        "MultiStepLR",
        START | {"milestones": [3, 9], "gamma": 0.5},
        "MultiStepLR",
        {"milestones": [3, 9], "gamma": 0.5},
    ),
    (
        "LinearLR",
        START | {"end_learning_rate": 0.45, "total_iters": 20},
        "LinearLR",
        {"start_factor": 1.0, "end_factor": 0.5, "total_iters": 20},
    ),
    (
        "PolynomialLR",
        START | {"end_learning_rate": 0.0, "total_iters": 20, "power": 3.0},
        "PolynomialLR",
        {"total_iters": 20, "power": 3.0},
    ),
    (
        "ExponentialLR",
        START | {"total_iters": 1, "decay_rate": 0.9},
        "ExponentialLR",
        {"gamma": 0.9},
    ),
    (
        "CosineAnnealingLR",
        START | {"T_max": 20, "eta_min": 0.1},
        "CosineAnnealingLR",
        {"T_max": 20, "eta_min": 0.1},
    ),
    (
        "CosineAnnealingWarmRestarts",
        START | {"T_0": 7, "eta_min": 0.1},
        "CosineAnnealingWarmRestarts",
        {"T_0": 7, "eta_min": 0.1},
    ),
    (
        "CosineAnnealingWarmRestarts",
        START | {"T_0": 7, "T_mult": 2},
        "CosineAnnealingWarmRestarts",
        {"T_0": 7, "T_mult": 2},
    ),
    ("CyclicLR", CYCLE, "CyclicLR", CYCLE),
    ("CyclicLR", CYCLE | {"mode": "triangular2"}, "CyclicLR", CYCLE | {"mode": "triangular2"}),
    (
        "CyclicLR",
        CYCLE | {"mode": "exp_range", "gamma": 0.97},
        "CyclicLR",
        CYCLE | {"mode": "exp_range", "gamma": 0.97},
    ),
    (
        "OneCycleLR",
        ONE_CYCLE | {"initial_learning_rate": 0.09},
        "OneCycleLR",
        ONE_CYCLE | {"div_factor": 10},
    ),
    (
        "OneCycleLR",
        ONE_CYCLE | {"initial_learning_rate": 0.09, "anneal_strategy": "linear"},
        "OneCycleLR",
        ONE_CYCLE | {"div_factor": 10, "anneal_strategy": "linear"},
    ),
    (
        "OneCycleLR",
        ONE_CYCLE | {"initial_learning_rate": 0.09, "three_phase": True, "final_div_factor": 50.0},
        "OneCycleLR",
        ONE_CYCLE | {"div_factor": 10, "three_phase": True, "final_div_factor": 50.0},
    ),
]


@pytest.mark.parametrize(("name", "arguments", "their_name", "their_arguments"), THEIRS)
def test_a_schedule_is_that_of_torch(name, arguments, their_name, their_arguments):
    ours = scheduler_class(name)(None, **arguments)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.9, momentum=0.9)
    scheduler = getattr(theirs, their_name)(optimizer, **their_arguments)
    for step in range(NUM_STEPS):
        assert ours.value(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9), step
        optimizer.step()
        if step < NUM_STEPS - 1:
            scheduler.step()


def test_one_cycle_stays_at_its_lowest():
    schedule = scheduler_class("OneCycleLR")(None, 0.1, 0.9, total_steps=10, final_div_factor=4.0)
    assert [schedule.value(step) for step in (9, 10, 99)] == pytest.approx([0.025] * 3)


def test_the_scale_mode_of_a_cycle_can_be_chosen():
    make = scheduler_class("CyclicLR")
    schedule = make(None, 0.0, 1.0, 2, mode="exp_range", gamma=0.5, scale_mode="cycle")
    assert [schedule.value(step) for step in (2, 6)] == [0.5, 0.25]


def test_a_lambda_schedule_multiplies_what_its_subclass_returns():
    class Halves(LambdaLR):
        def factor(self, step):
            return 0.5**step

    schedule = Halves(None, initial_learning_rate=0.8)
    assert [schedule.value(step) for step in range(3)] == [0.8, 0.4, 0.2]


def halves(step):
    return 0.5**step


@pytest.fixture
def here(monkeypatch):
    """Makes the functions of this file importable by a dotted path."""
    monkeypatch.setitem(sys.modules, "my_curves", sys.modules[__name__])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "argument"), [("LambdaLR", "lr_lambda"), ("LambdaWD", "val_lambda")]
)
def test_a_lambda_schedule_takes_a_function_or_its_path(name, argument):
    for function in (halves, "my_curves.halves"):
        schedule = scheduler_class(name)(None, 0.8, **{argument: function})
        assert [schedule.value(step) for step in range(3)] == [0.8, 0.4, 0.2]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("halves", r"LambdaLR\.lr_lambda: 'halves' is not the dotted path of a function"),
        ("no_such.halves", r"LambdaLR\.lr_lambda: cannot import the module 'no_such'"),
        ("my_curves.halfes", r"my_curves has no function 'halfes'\. Did you mean 'halves'"),
        ("my_curves.NUM_STEPS", r"my_curves has no function 'NUM_STEPS'"),
    ],
)
def test_a_path_that_leads_to_no_function_is_refused(path, message):
    with pytest.raises(ConfigError, match=message):
        scheduler_class("LambdaLR")(None, 0.8, lr_lambda=path)


@pytest.mark.parametrize("name", ["LambdaLR", "LambdaWD"])
def test_a_lambda_schedule_has_one_function(name):
    cls = scheduler_class(name)
    with pytest.raises(ConfigError, match=rf"{name} .* no function\. .*set \w+_lambda"):
        cls(None, 0.1)
    mine = type("Mine", (cls,), {"factor": lambda self, step: 1.0})
    assert mine(None, 0.1).value(3) == 0.1
    with pytest.raises(ConfigError, match=r"Mine .* two functions\."):
        mine(None, 0.1, halves)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "LinearLR",
            LINE | {"total_iters": 0},
            r"LinearLR\.total_iters: expected [^,]*> 0.*, got 0",
        ),
        (
            "CosineDecayLR",
            LINE | {"total_iters": -1},
            r"CosineDecayLR\.total_iters: expected .*, got -1",
        ),
        (
            "CosineDecayWD",
            WD_LINE | {"total_iters": 0},
            r"CosineDecayWD\.total_iters: expected .*, got 0",
        ),
        ("LinearWD", WD_LINE | {"total_iters": 0}, r"LinearWD\.total_iters: expected .*, got 0"),
        (
            "ConstantLR",
            {"learning_rate": 1.0, "total_iters": 0},
            r"ConstantLR\.total_iters: expected .*, got 0",
        ),
        (
            "StepLR",
            START | {"step_size": 0, "gamma": 1.0},
            r"StepLR\.step_size: expected .*, got 0",
        ),
        (
            "CosineAnnealingLR",
            START | {"T_max": 0},
            r"CosineAnnealingLR\.T_max: expected .*, got 0",
        ),
        (
            "CosineAnnealingWarmRestarts",
            START | {"T_0": 5, "T_mult": 0},
            r"T_mult: expected .*, got 0",
        ),
        ("InverseSquareRootDecayLR", {"warmup_steps": 0}, r"warmup_steps: expected .*, got 0"),
        (
            "CyclicLR",
            CYCLE | {"mode": "triangle"},
            r"CyclicLR\.mode: expected .*, got 'triangle'\. Did you mean",
        ),
        ("OneCycleLR", START | {"max_lr": 1.0, "pct_start": 1.5}, r"OneCycleLR\.pct_start=1\.5 "),
        (
            "MultiStepLR",
            START | {"gamma": 0.5, "milestones": [5, 5]},
            r"MultiStepLR\.milestones: expected .*increasing.*> 0.*, got \[5, 5\]",
        ),
        (
            "MultiStepLR",
            START | {"gamma": 0.5, "milestones": []},
            r"MultiStepLR\.milestones: expected .*increasing.*, got \[\]",
        ),
        (
            "LinearLR",
            LINE | {"initial_learning_rate": -0.1},
            r"LinearLR\.initial_learning_rate: expected .*, got -0",
        ),
        (
            "CosineDecayLR",
            LINE | {"end_learning_rate": -1},
            r"CosineDecayLR\.end_learning_rate: expected .*, got -",
        ),
        (
            "ConstantLR",
            {"learning_rate": math.inf},
            r"learning_rate: expected [^,]*>= 0.*, got inf",
        ),
        (
            "CosineAnnealingLR",
            START | {"T_max": 5, "eta_min": -1.0},
            r"eta_min: expected .*, got -1\.0",
        ),
        ("CyclicLR", CYCLE | {"max_lr": math.nan}, r"CyclicLR\.max_lr: expected .*, got nan"),
        (
            "StepLR",
            START | {"step_size": 3, "gamma": -1.0},
            r"StepLR\.gamma: expected .*, got -1\.0",
        ),
        (
            "MultiplicativeLR",
            START | {"coefficient": -2},
            r"MultiplicativeLR\.coefficient: expected .*, got -2",
        ),
        (
            "CosineDecayWD",
            WD_LINE | {"end_val": -1.0},
            r"CosineDecayWD\.end_val: expected .*, got -1\.0",
        ),
        ("ConstantWD", {"val": -0.1}, r"ConstantWD\.val: expected .*, got -0\.1"),
        (
            "ConstantLR",
            {"learning_rate": 1.0, "param_group_tags": []},
            r"param_group_tags is empty",
        ),
        (
            "PiecewiseConstantLR",
            {"learning_rates": [1.0, -2.0], "milestones": [1]},
            r"learning_rates\[1\]: expected a finite number >= 0, got -2\.0",
        ),
        (
            "PiecewiseConstantLR",
            {"learning_rates": [1.0, 2.0], "milestones": [1, 2]},
            r"PiecewiseConstantLR\.learning_rates has 2 values, but 2 milestones need 3",
        ),
    ],
)
def test_an_argument_that_does_not_fit_is_refused_by_name(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        scheduler_class(name)(None, **arguments)


def test_names_of_schedules_are_found_in_any_case():
    assert all(scheduler_class(name.upper()) is cls for name, cls in SCHEDULERS.items())


def test_a_misspelt_schedule_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"'LinearLX' is not a scheduler. Did you mean 'Linear"):
        scheduler_class("LinearLX")


def test_all_schedules_have_a_key_and_none_can_be_called():
    for name, cls in SCHEDULERS.items():
        assert cls.param_group_key == ("weight_decay" if name.endswith("WD") else "lr")
        assert issubclass(cls, LRScheduler) != name.endswith("WD")
        assert "__call__" not in dir(cls)


def test_a_cycle_can_be_made_longer_later():
    schedule = scheduler_class("CyclicLR")(None, 0.0, 1.0, 10)
    assert schedule.value(12) == pytest.approx(0.8)
    schedule.step_size_down = 40
    assert schedule.value(12) == pytest.approx(0.95)
