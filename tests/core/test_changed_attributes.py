"""Attributes that come, go or change during the life of a trainer: its checkpoints follow them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, Checkpoint, Trainer, checkpointing
from tests.doubles import TinyModel, make_trainer, tiny_batches

BATCHES = tiny_batches(4)
AT_FIRST: Final = {
    "critic": "Critic",
    "listed.0": "Adam",
    "model.head.by_name.head": "Adam",
}


class Critic(TinyModel):
    """A module that can be a callback, too."""

    def on_train_end(self, trainer, model, loop, loop_idx):
        """Listen, so that it is a callback."""


class Holder(nn.Module):
    """A module without parameters that has an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.own = optimizer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


def adam(module: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with a state."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for param in module.parameters():
        param.grad = torch.rand_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def make(folder: Path, *callbacks: Any) -> Trainer:
    trainer = make_trainer(folder, *callbacks, num_steps=2, checkpoint=Checkpoint(steps=1))
    torch.manual_seed(len(folder.name))
    trainer.critic = Critic()
    trainer.listed = [adam(trainer.critic)]
    trainer.model.head.by_name = {"head": adam(trainer.model.head)}
    return trainer


def attributes_in(path: Path) -> dict[str, Any]:
    return checkpointing.load(path)["attributes"]


def kinds_of(attributes: Mapping[str, Any]) -> dict[str, str]:
    return {name: entry["kind"] for name, entry in attributes.items()}


def are_equal(first: Any, second: Any) -> bool:
    """Return whether two nested states are equal bit by bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(
            are_equal(value, second[key]) for key, value in first.items()
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(are_equal, first, second))
    return first == second


# ---- the changes, each with the attributes that it adds, and those that it removes


def set_a_module(trainer: Trainer) -> None:
    trainer.second = TinyModel()


def set_an_optimizer(trainer: Trainer) -> None:
    trainer.critic_optimizer = adam(trainer.critic)


def set_in_vars(trainer: Trainer) -> None:
    vars(trainer)["second"] = TinyModel()


def set_another_module(trainer: Trainer) -> None:
    trainer.critic = nn.Linear(2, 2)


def set_another_list(trainer: Trainer) -> None:
    trainer.listed = (torch.optim.SGD(trainer.critic.parameters(), 0.1, momentum=0.9),)


def delete_a_module(trainer: Trainer) -> None:
    del trainer.critic


def append_to_a_list(trainer: Trainer) -> None:
    trainer.listed.append(adam(trainer.critic))


def replace_in_a_list(trainer: Trainer) -> None:
    trainer.listed[0] = torch.optim.SGD(trainer.critic.parameters(), 0.1, momentum=0.9)


def add_to_a_dict_of_a_submodule(trainer: Trainer) -> None:
    trainer.model.head.by_name["bias"] = adam(trainer.model.head)


def set_on_a_submodule(trainer: Trainer) -> None:
    trainer.model.hidden.own = adam(trainer.model.hidden)


def set_on_a_module_beside(trainer: Trainer) -> None:
    trainer.critic.head.own = adam(trainer.critic.head)


def add_a_submodule(trainer: Trainer) -> None:
    trainer.model.more = Holder(adam(trainer.model.hidden))


def replace_a_submodule(trainer: Trainer) -> None:
    trainer.model.head = nn.Linear(4, 1)


def replace_a_submodule_in_its_table(trainer: Trainer) -> None:
    trainer.model._modules["dropout"] = Holder(adam(trainer.model.hidden))


def move_into_the_model(trainer: Trainer) -> None:
    trainer.model.critic = trainer.critic


def add_as_a_callback(trainer: Trainer) -> None:
    trainer.add_callback(trainer.critic)


def name_as_unsaved(trainer: Trainer) -> None:
    trainer.unsaved_attributes = ("critic", "listed")


CHANGES: Final[list[tuple[Callable[[Trainer], None], dict[str, str], set[str]]]] = [
    (set_a_module, {"second": "TinyModel"}, set()),
    (set_an_optimizer, {"critic_optimizer": "Adam"}, set()),
    (set_in_vars, {"second": "TinyModel"}, set()),
    (set_another_module, {"critic": "Linear"}, set()),
    (set_another_list, {"listed.0": "SGD"}, set()),
    (delete_a_module, {}, {"critic"}),
    (append_to_a_list, {"listed.1": "Adam"}, set()),
    (replace_in_a_list, {"listed.0": "SGD"}, set()),
    (add_to_a_dict_of_a_submodule, {"model.head.by_name.bias": "Adam"}, set()),
    (set_on_a_submodule, {"model.hidden.own": "Adam"}, set()),
    (set_on_a_module_beside, {"critic.head.own": "Adam"}, set()),
    (add_a_submodule, {"model.more.own": "Adam"}, set()),
    (replace_a_submodule, {}, {"model.head.by_name.head"}),
    (replace_a_submodule_in_its_table, {"model.dropout.own": "Adam"}, set()),
    (move_into_the_model, {}, {"critic"}),
    (add_as_a_callback, {}, {"critic"}),
    (name_as_unsaved, {}, {"critic", "listed.0"}),
]


class AfterFirstStep(Callback):
    """Changes the trainer between its first two checkpoints."""

    def __init__(self, change: Callable[[Trainer], None]) -> None:
        self.change = change

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.global_step == 1:
            self.change(trainer)


@pytest.mark.parametrize(("change", "added", "removed"), CHANGES)
@pytest.mark.slow_cases(every=4)
def test_the_next_checkpoint_has_what_is_there(tmp_path, change, added, removed) -> None:
    trainer = make(tmp_path / "first", AfterFirstStep(change))
    trainer.fit(BATCHES)
    trainer.close()
    before, after = (attributes_in(tmp_path / f"first/checkpoint_{step}") for step in (1, 2))
    assert kinds_of(before) == AT_FIRST
    expected = {name: kind for name, kind in (AT_FIRST | added).items() if name not in removed}
    assert kinds_of(after) == expected

    other = make(tmp_path / "another")
    own = attributes_in(other.save_checkpoint())
    assert kinds_of(own) == AT_FIRST
    assert not any(are_equal(own[name], after[name]) for name in own.keys() & after.keys())
    change(other)
    other.load_checkpoint(tmp_path / "first/checkpoint_2")
    assert are_equal(attributes_in(other.save_checkpoint()), after)
    other.close()


@pytest.mark.parametrize(
    ("change", "added", "removed"),
    [
        (set_a_module, {"second"}, set()),
        (append_to_a_list, {"listed.1"}, set()),
        (replace_a_submodule, set(), {"model.head.by_name.head"}),
    ],
)
def test_a_second_fit_saves_what_is_there(tmp_path, change, added, removed) -> None:
    trainer = make(tmp_path)
    trainer.fit(BATCHES)
    change(trainer)
    trainer.fit(BATCHES)
    trainer.close()
    saved = attributes_in(tmp_path / "checkpoint_4")
    assert saved.keys() == (AT_FIRST.keys() | added) - removed


def test_a_module_that_is_no_callback_any_more_is_saved(tmp_path) -> None:
    trainer = make(tmp_path)
    handle = trainer.add_callback(trainer.critic)
    trainer.fit(BATCHES)
    handle.remove()
    trainer.fit(BATCHES)
    trainer.close()
    before, after = (attributes_in(tmp_path / f"checkpoint_{step}") for step in (2, 4))
    assert after.keys() - before.keys() == {"critic"}
