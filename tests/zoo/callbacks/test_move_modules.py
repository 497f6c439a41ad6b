"""Modules besides the model, on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.callbacks.move_modules import MoveModulesToDevice


class Distill(Callback):
    def __init__(self):
        self.teacher = nn.Linear(2, 2)
        self.table = {"a": 1}


@pytest.fixture
def distill():
    return Distill()


def device_of(module):
    return next(module.parameters()).device.type


class Look(Callback):
    """Record the devices of modules in a run."""

    def __init__(self, *find):
        self.find = find

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.seen = tuple(device_of(find(trainer)) for find in self.find)

    def on_validate_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.seen = tuple(device_of(find(trainer)) for find in self.find)


def teacher(trainer):
    return trainer.callbacks["Distill"].teacher


def critic(trainer):
    return trainer.critic


def test_all_modules_of_trainer_and_callbacks_are_moved_when_a_fit_begins(make, batches, distill):
    look = Look(critic, teacher)
    trainer = make(distill, MoveModulesToDevice(), look, device="meta")
    trainer.critic = nn.Linear(2, 2)
    assert (device_of(trainer.critic), device_of(distill.teacher)) == ("cpu", "cpu")
    trainer.fit(batches)
    assert look.seen == ("meta", "meta")


def test_they_are_moved_for_a_validation_alone(make, batches, distill):
    look = Look(teacher)
    make(distill, MoveModulesToDevice(), look, device="meta").validate(batches[:1])
    assert look.seen == ("meta",)


def test_only_those_that_are_named_are_moved(make, batches, distill):
    look = Look(critic, teacher)
    moving = MoveModulesToDevice(["callbacks.Distill.teacher"])
    trainer = make(distill, moving, look, device="meta")
    trainer.critic = nn.Linear(2, 2)
    trainer.fit(batches)
    assert look.seen == ("cpu", "meta")


def test_the_model_is_left_alone(make, batches):
    moved = []

    class Watched(nn.Linear):
        def to(self, *args, **kwargs):
            moved.append(args)
            return super().to(*args, **kwargs)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = Watched(4, 1)

        def forward(self, batch):
            return ((self.head(batch[0]) - batch[1]) ** 2).mean()

    trainer = make(MoveModulesToDevice(), model=Model)
    trainer.also = trainer.model.head
    trainer.fit(batches)
    assert not moved


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("critic", "'critic': Trainer has no attribute 'critic'"),
        ("global_step", "trainer.global_step is a int, not a torch.nn.Module"),
        ("callbacks.Distil.teacher", "a callback that does not exist. Did you mean 'Distill'"),
        ("callbacks.Distill.pupil", "has no attribute 'pupil'"),
        ("callbacks.Distill", "trainer.callbacks.Distill is a Distill, not"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(make, batches, distill, name, message):
    with pytest.raises(ConfigError, match=message):
        make(distill, MoveModulesToDevice([name])).fit(batches)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([], r"modules: expected a list of names such as 'teacher' or null, got \[\]"),
        ([""], r"modules: expected a list of names such as 'teacher' or null, got \[''\]"),
        ([1], r"modules\[0\]: expected a string, got 1"),
        ("teacher", "modules: expected a list of names such as 'teacher' or null, got 'teacher'"),
    ],
)
def test_what_is_no_list_of_names_is_refused(modules, message):
    with pytest.raises(ConfigError, match=message):
        MoveModulesToDevice(modules)


def test_a_dry_run_leaves_the_values_of_modules_that_are_no_part_of_the_model(make, batches):
    class Distill(Callback):
        def __init__(self):
            self.teacher = nn.BatchNorm1d(4)

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            places.add(self.teacher.weight.device.type)

    places = set()
    own = Distill()
    before = {name: value.clone() for name, value in own.teacher.state_dict().items()}
    make(own, MoveModulesToDevice(), device="meta").fit(batches)
    assert places == {"meta"}
    after = own.teacher.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
