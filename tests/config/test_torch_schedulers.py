"""torch's optimizers and schedulers by their dotted paths, nested ones too."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as theirs

from modelzoo_trainer import Checkpoint
from modelzoo_trainer.config.fitting import WithoutOptimizer, with_optimizer
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.positions import Place, Problems
from modelzoo_trainer.config.sections import check_optimizer, check_scheduler
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.stepwise import StepLR
from tests.doubles import TinyModel, make_trainer, tiny_batches

T = "torch.optim.lr_scheduler"
WARM_UP = f"{T}.LinearLR: {{start_factor: 0.5, total_iters: 3}}"
DECAY = f"{T}.ExponentialLR: {{gamma: 0.9}}"
MILESTONES = f"{T}.MultiStepLR: {{milestones: [2, 2, 4], gamma: 0.5}}"
SEQUENCE = f"{T}.SequentialLR: {{schedulers: [{{{WARM_UP}}}, {{{DECAY}}}], milestones: [3]}}"
CHAIN = f"{T}.ChainedScheduler: {{schedulers: [{{{WARM_UP}}}, {{{DECAY}}}]}}"


@pytest.fixture(scope="module")
def names():
    shipped = shipped_names()
    table = dataclasses.replace(shipped.schedulers, adapt=with_optimizer)
    return dataclasses.replace(shipped, schedulers=table)


@pytest.fixture
def sgd():
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.8, momentum=0.9)


def component(text, names, check=check_scheduler):
    problems = Problems()
    node = read_text(text, "params.yaml")
    found = check(Place(node, "schedulers[0]", node.at), names, problems)
    problems.raise_if_any()
    return found


def rates(optimizer, scheduler, num_steps=8):
    seen = []
    for _ in range(num_steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def by_hand(text):
    """Return the learning rates that torch's own classes give."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.8, momentum=0.9)
    members = [theirs.LinearLR(optimizer, 0.5, total_iters=3), theirs.ExponentialLR(optimizer, 0.9)]
    made = {
        SEQUENCE: lambda: theirs.SequentialLR(optimizer, members, [3]),
        CHAIN: lambda: theirs.ChainedScheduler(members),
    }[text]()
    return rates(optimizer, made)


@pytest.mark.parametrize("text", [SEQUENCE, CHAIN])
def test_members_are_built_with_the_optimizer(names, sgd, text):
    made = component(text, names).build(sgd)
    assert rates(sgd, made) == by_hand(text)
    assert len(set(by_hand(text))) > 4


def test_a_sequence_in_a_chain_is_built(names, sgd):
    text = f"{T}.ChainedScheduler: {{schedulers: [{{{SEQUENCE}}}, {{{DECAY}}}]}}"
    made = component(text, names).build(sgd)
    assert [type(one).__name__ for one in made._schedulers] == ["SequentialLR", "ExponentialLR"]
    assert [type(one).__name__ for one in made._schedulers[0]._schedulers] == [
        "LinearLR",
        "ExponentialLR",
    ]


def test_a_plain_scheduler_of_torchs_is_built(names, sgd):
    made = component(f"{T}.CosineAnnealingLR: {{T_max: 10}}", names).build(sgd)
    assert type(made) is theirs.CosineAnnealingLR
    assert made.T_max == 10


def test_what_is_no_scheduler_of_torchs_is_left_as_it_is():
    assert with_optimizer(StepLR) is StepLR
    assert with_optimizer(len) is len


def test_an_argument_is_checked_by_name_and_type(names):
    with pytest.raises(ConfigError) as caught:
        component(f"{T}.CosineAnnealingLR: {{T_mx: 10}}", names)
    assert "T_mx: no such argument of CosineAnnealingLR. Did you mean 'T_max'?" in str(caught.value)
    with pytest.raises(ConfigError, match="schedulers: missing; ChainedScheduler requires it"):
        component(f"{T}.ChainedScheduler: {{}}", names)


def test_a_scheduler_that_needs_a_metric_is_refused(names):
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau requires a metric at each step, but"):
        component(f"{T}.ReduceLROnPlateau: {{}}", names)


def test_members_of_ours_in_one_of_torchs_are_refused(names, sgd):
    ours = "{StepLR: {initial_learning_rate: 0.1, step_size: 2, gamma: 0.5}}"
    text = f"{T}.SequentialLR: {{schedulers: [{ours}], milestones: []}}"
    with pytest.raises(
        ConfigError, match=r"schedulers\[0\]: StepLR is not a torch scheduler.* SequentialLR \("
    ):
        component(text, names).build(sgd)


def test_members_of_torchs_in_one_of_ours_are_refused(names):
    text = f"SequentialLR: {{schedulers: [{{{DECAY}}}]}}"
    with pytest.raises(ConfigError, match=r"torch\S+ExponentialLR is not a scheduler of modelzoo"):
        component(text, names)


def halves(step):
    return 0.5**step


@pytest.fixture
def my_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "my_factors", sys.modules[__name__])


@pytest.mark.usefixtures("my_module")
@pytest.mark.parametrize("path", ["my_factors.halves", "[my_factors.halves]"])
def test_a_function_is_given_by_its_path(names, sgd, path):
    made = component(f"{T}.LambdaLR: {{lr_lambda: {path}}}", names).build(sgd)
    assert rates(sgd, made, 3) == [0.8, 0.4, 0.2]


@pytest.mark.usefixtures("my_module")
def test_a_path_without_a_function_is_refused(names, sgd):
    found = component(f"{T}.LambdaLR: {{lr_lambda: my_factors.halfes}}", names)
    with pytest.raises(
        ConfigError, match=r"LambdaLR\.lr_lambda: my_factors has no function 'halfe"
    ):
        found.build(sgd)


@pytest.mark.parametrize(
    "text",
    [
        f"{T}.OneCycleLR: {{max_lr: 0.4, total_steps: 9}}",
        f"{T}.CyclicLR: {{base_lr: 0.1, max_lr: 0.4, step_size_up: 2}}",
    ],
)
def test_absolute_rates_are_multiplied_by_the_factors_of_groups(names, text):
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": params[:1]}, {"params": params[1:], "adjust_learning_rate": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.8, momentum=0.9)
    scheduler = component(text, names).build(optimizer)
    for _ in range(6):
        optimizer.step()
        scheduler.step()
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert second == pytest.approx(first / 2)


def test_one_that_waits_makes_a_scheduler_for_each_optimizer(sgd):
    waiting = WithoutOptimizer(theirs.StepLR, {"step_size": 2})
    assert waiting(None) is waiting
    assert repr(waiting) == "torch.optim.lr_scheduler.StepLR"
    first, second = waiting(sgd), waiting(sgd)
    assert first is not second
    assert waiting.arguments == {"step_size": 2}


def test_an_optimizer_of_torchs_takes_the_factors_of_a_model(names):
    text = "torch.optim.AdamW: {lr: 0.5, adjust_learning_rate: {first: 0.5}}"
    model = nn.Linear(2, 2)
    model.lr_adjustment_groups = {"first": Group()}
    made = component(text, names, check_optimizer).build(model)
    assert type(made) is torch.optim.AdamW
    assert [group["lr"] for group in made.param_groups] == [0.25, 0.5]


class Group:
    param_filter_patterns = ("weight",)
    scale = 1.0


@pytest.mark.parametrize("text", [SEQUENCE, CHAIN, MILESTONES, f"{T}.StepLR: {{step_size: 2}}"])
def test_a_resumed_run_goes_on_with_the_state_of_torchs_scheduler(names, tmp_path, text):
    def run(folder, max_steps):
        trainer = make_trainer(
            tmp_path / folder,
            model=TinyModel,
            schedulers=[component(text, names).build],
            checkpoint=Checkpoint(steps=3),
            max_steps=max_steps,
        )
        trainer.fit(tiny_batches(6), None)
        return trainer

    unbroken = run("whole", 6)
    run("broken", 3)
    resumed = run("broken", 6)
    assert resumed.global_step == 6
    assert resumed.schedulers[0].state_dict() == unbroken.schedulers[0].state_dict()
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [
        group["lr"] for group in unbroken.optimizer.param_groups
    ]


def test_a_plateau_is_refused_by_the_trainer_as_well(tmp_path):
    with pytest.raises(ConfigError, match=r"schedulers\[0\]: ReduceLROnPlateau .*metric"):
        make_trainer(tmp_path, schedulers=[lambda optimizer: theirs.ReduceLROnPlateau(optimizer)])
