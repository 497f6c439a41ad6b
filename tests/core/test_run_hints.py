"""Hints about torch's schedulers, and the refusal of one that is too short."""

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedulers

from modelzoo_trainer import Checkpoint, ConfigError
from modelzoo_trainer.core.parts.run_hints import hints_of
from modelzoo_trainer.optim import AdamW, LinearLR, OneCycleLR
from tests.doubles import tiny_batches


@pytest.fixture
def trained(trainer_of, tmp_path):
    """A function that trains 10 steps with a scheduler, and returns the trainer."""

    def train(make: Any, max_steps: int = 10, **settings: Any) -> Any:
        trainer = trainer_of(
            model_dir=tmp_path,
            schedulers=make,
            max_steps=max_steps,
            checkpoint=Checkpoint(steps=5),
            **settings,
        )
        trainer.fit(tiny_batches(10))
        return trainer

    return train


@pytest.fixture
def hints(monkeypatch, trained):
    """A function that returns the hints at the start of a run with a scheduler."""
    found: list[str] = []
    monkeypatch.setattr(
        "modelzoo_trainer.core.run_schedule.log_hints",
        lambda trainer, val_dataloader: found.extend(hints_of(trainer, val_dataloader)),
    )

    def of(make: Any, **settings: Any) -> list[str]:
        trained(make, **settings)
        return found

    return of


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda one: torch_schedulers.CosineAnnealingLR(one, 7), ["T_max is 7", "10 steps"]),
        (lambda one: torch_schedulers.CosineAnnealingLR(one, 70), ["T_max is 70", "10 steps"]),
        (lambda one: torch_schedulers.OneCycleLR(one, 0.1, 70), ["total_steps is 70", "10"]),
        (lambda one: OneCycleLR(one, 0.1, 0.5, total_steps=7), ["step 7", "run at step 10"]),
        (lambda one: OneCycleLR(one, 0.1, 0.5, total_steps=70), ["step 70", "run at step 10"]),
    ],
)
def test_a_schedule_of_another_length_is_hinted_at(hints, make, facts):
    [hint] = hints(make)
    assert all(fact in hint for fact in facts)


@pytest.mark.parametrize(
    "make",
    [
        lambda one: torch_schedulers.CosineAnnealingLR(one, 10),
        lambda one: torch_schedulers.OneCycleLR(one, 0.1, 10),
        lambda one: OneCycleLR(one, 0.1, 0.5, total_steps=10),
        lambda one: torch_schedulers.StepLR(one, 3),
    ],
)
def test_a_schedule_of_the_length_of_the_run_is_not(hints, make):
    assert hints(make) == []


def test_a_one_cycle_of_torch_that_is_too_short_is_refused_before_the_first_step(trained):
    with pytest.raises(ConfigError, match=r"total_steps is 9\b.* 10 steps.*total_steps=10") as info:
        trained(lambda one: torch_schedulers.OneCycleLR(one, 0.1, 9))
    assert "ValueError" not in str(info.value)


def test_the_steps_before_a_resumed_run_count(trained):
    trained(lambda one: torch_schedulers.OneCycleLR(one, 0.1, 20))
    assert trained(lambda one: torch_schedulers.OneCycleLR(one, 0.1, 20), 20).global_step == 20
    with pytest.raises(ConfigError, match=r"total_steps is 20\b.* 21 steps"):
        trained(lambda one: torch_schedulers.OneCycleLR(one, 0.1, 20), 21)


@pytest.mark.parametrize(
    ("optimizer", "num"),
    [
        (lambda model: torch.optim.AdamW(model.parameters(), lr=0.03), 1),
        (lambda model: torch.optim.AdamW(model.parameters(), lr=0.5), 0),  # the schedule has it
        (lambda model: torch.optim.AdamW(model.parameters()), 0),
        (lambda model: AdamW(model, learning_rate=0.03), 1),
        (lambda model: AdamW(model), 0),
    ],
)
@pytest.mark.slow_cases(every=4)
def test_a_learning_rate_that_a_schedule_replaces_is_hinted_at(hints, optimizer, num):
    found = hints(lambda one: LinearLR(one, 0.0, 0.5, total_iters=10), optimizer=optimizer)
    assert len(found) == num
    assert all("0.03" in hint and "LinearLR" in hint for hint in found)


class Counter:
    """A scheduler of the user's, which is not derived from torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_scheduler_of_the_users_does_not_hide_the_hints_about_others(hints):
    [hint] = hints([lambda one: OneCycleLR(one, 0.1, 0.5, total_steps=7), lambda one: Counter(one)])
    assert "step 7" in hint
