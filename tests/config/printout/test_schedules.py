"""What a report tells of schedules, against the schedules themselves."""

from __future__ import annotations

import re
import sys

import pytest

from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.printout.components import WIDTH
from modelzoo_trainer.config.printout.schedules import schedule_lines, telling_steps
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.optim import LRScheduler, Scheduler

FILE = """\
trainer:
  init:
    model: {name: fc_mnist, hidden_sizes: [4]}
    optimizer: {SGD: {RATE params: [{params: '*', tag: head}]}}
    loop: {LOOP}
    schedulers:
      - SCHEDULE
  fit:
    train_dataloader: {data_processor: SyntheticProcessor, batch_size: 4}
"""
UP = "LinearLR: {initial_learning_rate: 0, end_learning_rate: 0.5, total_iters: 10}"
DOWN = "CosineDecayLR: {initial_learning_rate: 0.5, end_learning_rate: 0.1, total_iters: 30}"
LEVELS = "_.:-=+*#%@"


class Halves(LRScheduler):
    """One of the user's: it is not made for a report."""

    def __init__(self, optimizer=None, param_group_tags=None):
        assert optimizer is not None, "a report makes nothing of the user's"
        super().__init__(optimizer, param_group_tags)

    def value(self, step):
        return 0.5**step


@pytest.fixture(scope="module")
def names():
    return shipped_names()


@pytest.fixture
def plan(names):
    """Return a function from a schedule, and a loop, to a plan."""

    def make(schedule, loop="max_steps: 40", rate=""):
        text = FILE.replace("SCHEDULE", schedule).replace("LOOP", loop).replace("RATE", rate)
        return check_config(read_text(text, "params.yaml"), names, "train")[0]

    return make


@pytest.fixture
def told(plan):
    """Return a function from a schedule, and a loop, to the lines of a report."""

    def tell(schedule, loop="max_steps: 40"):
        return schedule_lines(plan(schedule, loop))

    return tell


def table(lines):
    """Return the steps and the values of a report, as it writes them."""
    steps = next(line for line in lines if line.startswith("      steps "))
    values = next(line for line in lines if line.startswith("      value "))
    return [int(step) for step in steps.split()[1:]], values.split()[1:]


SCHEDULES = [
    UP,
    DOWN,
    f"SequentialLR: {{schedulers: [{UP}, {DOWN}]}}",
    f"SequentialLR: {{schedulers: [{UP}, SequentialLR: {{schedulers: [{UP}, {DOWN}]}}]}}",
    f"ScalePerParamLR: {{scheduler: {{{DOWN}}}}}",
    f"ChainedScheduler: {{schedulers: [{UP}, {DOWN}]}}",
    "ConstantLR: {learning_rate: 0.25}",
    "StepLR: {initial_learning_rate: 1, step_size: 7, gamma: 0.5}",
    "MultiStepLR: {initial_learning_rate: 1, gamma: 0.1, milestones: [3, 20]}",
    "PiecewiseConstantLR: {learning_rates: [1, 2, 3], milestones: [3, 20]}",
    "CosineAnnealingWarmRestarts: {initial_learning_rate: 1, T_0: 1}",
    "CyclicLR: {base_lr: 0, max_lr: 1, step_size_up: 5}",
    "OneCycleLR: {initial_learning_rate: 0.1, max_lr: 1, total_steps: 40}",
    "InverseSquareRootDecayLR: {}",
    "ConstantWD: {val: 0.01}",
    "LinearWD: {initial_val: 0, end_val: 1, total_iters: 20}",
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("end", [1, 2, 40, 123456789])
def test_the_values_that_are_told_are_those_of_the_schedule(plan, schedule, end):
    made = plan(schedule, f"max_steps: {end}")
    (component,) = made.init["schedulers"]
    scheduler: Scheduler = component.make(None)
    lines = schedule_lines(made)
    steps, values = table(lines)
    assert values == [f"{scheduler.value(step):.4g}" for step in steps]
    assert steps == sorted(set(steps))
    assert {0, 1, end} <= set(steps)
    assert len(steps) <= 9
    assert max(map(len, lines)) <= WIDTH
    assert lines[0].endswith(f" sets {scheduler.param_group_key} of all parameter groups")


def test_a_sequence_is_told_at_its_milestones_and_quarters(told):
    lines = told(f"SequentialLR: {{schedulers: [{UP}, {DOWN}]}}")
    assert lines == [
        "  schedulers[0]: SequentialLR sets lr of all parameter groups",
        "      steps        0     1    10    20    30    40",
        "      value        0  0.05   0.5   0.4   0.2   0.1",
        "      curve     _.:-==+*#%@@@@@@%%%%###**+++===---:::::::  0 to 0.5",
    ]


def test_the_curve_is_the_higher_the_denser(told):
    curve = told(UP, "max_steps: 9")[3]
    values = [0.05 * step for step in range(10)]
    drawn = "".join(LEVELS[round(9 * value / 0.45)] for value in values)
    assert curve == f"      curve     {drawn}  0 to 0.45"


def test_a_level_schedule_has_no_curve(told):
    assert len(told("ConstantLR: {learning_rate: 0.25}")) == 3


def test_the_milestones_of_members_count_from_their_beginning(plan):
    inner = f"SequentialLR: {{schedulers: [{UP}, {DOWN}]}}"
    made = plan(f"SequentialLR: {{schedulers: [{UP}, {inner}]}}")
    scheduler = made.init["schedulers"][0].make(None)
    # 10: the inner sequence begins; 20: its second member; 50: everything is over
    assert telling_steps(scheduler, 1000)[:5] == [0, 1000, 10, 20, 50]


def test_a_schedule_that_begins_later_is_told_from_there(plan, told):
    sequence = f"SequentialLR: {{last_epoch: 3, schedulers: [{UP}, {DOWN}]}}"
    lines = told(sequence, "max_steps: 26")
    scheduler = plan(sequence).init["schedulers"][0].make(None)
    steps, values = table(lines)
    assert steps == [0, 1, 6, 13, 20, 26]
    assert values == [f"{scheduler.value(step + 4):.4g}" for step in steps]
    assert values[:3] == ["0.2", "0.25", "0.5"]
    hint = " ".join(map(str.strip, lines[4:6]))
    assert "ends at step 36, after the end of the run at step 26: the last value is 0.2" in hint


def test_of_many_milestones_some_are_told_evenly(plan):
    milestones = list(range(10, 400, 10))
    rates = [1] * (len(milestones) + 1)
    made = plan(f"PiecewiseConstantLR: {{learning_rates: {rates}, milestones: {milestones}}}")
    scheduler = made.init["schedulers"][0].make(None)
    assert telling_steps(scheduler, 1000) == [0, 1000, 10, 110, 200, 290, 390, 1, 500]


def test_groups_are_told_by_their_tags(told):
    lines = told(UP.replace("total_iters: 10", "total_iters: 10, param_group_tags: [head, body]"))
    assert lines[0] == "  schedulers[0]: LinearLR sets lr of groups tagged head, body"


@pytest.mark.parametrize(
    "schedule",
    [
        "torch.optim.lr_scheduler.StepLR: {step_size: 3}",
        f"{Halves.__module__}.Halves: {{}}",
    ],
)
def test_a_schedule_of_the_users_is_known_only_when_it_runs(told, schedule):
    module, _, name = schedule.partition(":")[0].rpartition(".")
    (line,) = told(schedule)
    assert line == f"  schedulers[0]: {name} (of {module}): values are known only at run time"


def test_the_last_step_is_a_bound_if_the_data_decide(told):
    assert table(told(UP, "num_epochs: 2, steps_per_epoch: 20"))[0] == [0, 1, 10, 20, 30, 40]


@pytest.mark.parametrize(
    ("schedule", "last"), [(DOWN, 30), ("ConstantLR: {learning_rate: 0.25}", 1000)]
)
def test_a_run_of_unknown_length_shows_the_schedule_to_its_end(told, schedule, last):
    lines = told(schedule, "num_epochs: 2")
    assert table(lines)[0][-1] == last
    assert "hint" not in "".join(lines)


@pytest.mark.parametrize(
    ("schedule", "end", "hints"),
    [
        (UP, 10, []),
        (
            UP,
            20,
            [
                "the schedule ends at step 10, before the end of the run at step 20: "
                "the value stays at 0.5"
            ],
        ),
        (
            UP,
            8,
            [
                "the schedule ends at step 10, after the end of the run at step 8: "
                "the last value is 0.4 instead of 0.5"
            ],
        ),
        (UP.replace("0.5", "0"), 8, []),
        (UP.replace("0.5", "0"), 20, []),
        (UP.replace("total_iters: 10", "total_iters: 10, cycle: true"), 25, []),
        ("ConstantLR: {learning_rate: 1, total_iters: 5}", 20, []),
        (
            f"SequentialLR: {{schedulers: [{UP}, {DOWN}]}}",
            10,
            [
                "the schedule ends at step 40, after the end of the run at step 10: "
                "the last value is 0.5 instead of 0.1",
                "milestones after the end of the run at step 10: 10",
            ],
        ),
        (
            "MultiStepLR: {initial_learning_rate: 1, gamma: 0.1, milestones: [3, 9, 10, 11, 12]}",
            9,
            ["milestones after the end of the run at step 9: 9, 10, 11, ..."],
        ),
        (
            "MultiplicativeLR: {initial_learning_rate: 1, coefficient: 2}",
            2000,
            ["at step 2000 the value is too large for a float: the run will fail"],
        ),
    ],
)
def test_a_schedule_of_another_length_than_the_run_is_worth_a_hint(told, schedule, end, hints):
    lines = " ".join(line.strip() for line in told(schedule, f"max_steps: {end}"))
    assert re.split(r" ?hint: ", lines)[1:] == hints


def test_a_run_that_validates_only_has_no_schedules(names):
    text = FILE.replace("SCHEDULE", UP).replace("LOOP", "max_steps: 4").replace("RATE", "")
    text = text.replace("fit:", "validate:").replace("train_dataloader", "val_dataloader")
    (plan,) = check_config(read_text(text, "params.yaml"), names, "eval")
    assert schedule_lines(plan) == []


def never(step):
    raise AssertionError("it was called")


def test_a_function_of_the_users_is_not_called(told, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_factors", sys.modules[__name__])
    lines = told("LambdaLR: {initial_learning_rate: 1, lr_lambda: my_factors.never}")
    assert any("values are known only at run time" in line for line in lines)


@pytest.mark.parametrize(
    ("rate", "num"),
    [("lr: 0.03,", 1), ("learning_rate: 0.03,", 1), ("lr: 0.5,", 0), ("", 0)],
)
def test_a_learning_rate_that_a_schedule_replaces_is_worth_a_hint(plan, rate, num):
    hints = [line for line in schedule_lines(plan(UP, "max_steps: 10", rate)) if "hint" in line]
    assert len(hints) == num
    assert all("0.03" in hint for hint in hints)
