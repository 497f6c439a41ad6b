"""What objects keep in their attributes: found, saved, restored."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch

from modelzoo_trainer import checkpointing
from modelzoo_trainer.loading.hidden_state import (
    OF_DATA,
    OF_SAMPLERS,
    HiddenState,
    changed,
    snapshot,
)


class Inner:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Owner:
    """Has an attribute of each kind."""

    def __init__(self) -> None:
        self.python = random.Random(1)
        self.legacy = np.random.RandomState(2)
        self.numpy = np.random.default_rng(3)
        self.torch = torch.Generator().manual_seed(4)
        self.number, self.text, self.nothing = 1, "a", None
        self.numbers = [1, 2]
        self.order = list(range(100))
        self.names = {"a"}
        self.table = OrderedDict(a=1)
        self.recent = deque([1])
        self.array = np.arange(4)
        self.tensor = torch.arange(4.0)
        self.pair = ([1], random.Random(5))
        self.inner = Inner()
        self.frozen = frozenset({1})

    def change(self) -> list[Any]:
        """Change everything, and return what the generators give next."""
        self.number, self.text, self.nothing = self.number + 1, self.text + "b", 7
        self.numbers.append(3)
        self.order.reverse()
        self.names.add("b")
        self.table["b"] = 2
        self.recent.append(2)
        self.array[0] += 1
        self.tensor[0] += 1
        self.pair[0].append(2)
        self.inner.count += 1
        self.frozen |= {len(self.frozen) + 1}
        return [
            self.python.random(),
            self.legacy.rand(),
            self.numpy.random(),
            torch.rand((), generator=self.torch).item(),
            self.pair[1].random(),
        ]

    def plain(self) -> list[Any]:
        return [
            self.number,
            self.text,
            self.nothing,
            list(self.numbers),
            list(self.order),
            sorted(self.names),
            dict(self.table),
            list(self.recent),
            self.array.tolist(),
            self.tensor.tolist(),
            list(self.pair[0]),
            self.inner.count,
            sorted(self.frozen),
        ]


def test_all_that_changes_is_saved_and_restored_in_another_object() -> None:
    owner = Owner()
    hidden = HiddenState({"sampler": owner}, OF_SAMPLERS)
    owner.change()
    saved = hidden.save()
    expected = [owner.plain(), owner.change(), owner.plain()]
    other = Owner()
    array, numbers = other.array, other.numbers
    assert HiddenState({"sampler": other}, OF_SAMPLERS).load(saved) == []
    assert [other.plain(), other.change(), other.plain()] == expected
    assert other.array is array
    assert other.numbers is numbers


def test_going_back_restores_what_had_not_changed_then() -> None:
    owner = Owner()
    hidden = HiddenState({"sampler": owner}, OF_SAMPLERS)
    saved, before = hidden.save(), owner.plain()
    drawn = owner.change()
    hidden.load(saved)
    assert owner.plain() == before
    assert owner.change() == drawn


def test_what_has_not_changed_is_not_saved_but_for_generators() -> None:
    saved = HiddenState({"sampler": Owner()}, OF_SAMPLERS).save()
    assert sorted(saved) == [f"sampler.{name}" for name in (
        "legacy", "numpy", "pair[1]", "python", "torch"
    )]  # fmt: skip


def test_what_is_not_there_any_more_is_named() -> None:
    owner = Owner()
    saved = HiddenState({"sampler": owner}, OF_SAMPLERS).save()
    del owner.python
    assert HiddenState({"sampler": owner}, OF_SAMPLERS).load(saved) == ["sampler.python"]


def test_an_object_with_a_state_of_its_own_is_asked() -> None:
    class Asked:
        def __init__(self) -> None:
            self.value = 0

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"] + 100

    owner = Asked()
    hidden = HiddenState({"sampler": owner}, OF_SAMPLERS)
    owner.value = 3
    saved = hidden.save()
    owner.value = 5
    hidden.load(saved)
    assert owner.value == 103


def test_cycles_and_large_values_end_the_search() -> None:
    owner = Owner()
    owner.self = owner
    owner.large = np.zeros(1 << 20)
    owner.many = [Inner() for _ in range(100_000)]
    owner.text = "x" * (1 << 20)
    before = snapshot({"": owner})
    owner.large += 1
    assert changed(before, snapshot({"": owner})) == []
    assert len(before) < OF_DATA.num_values


@pytest.mark.parametrize(
    ("name", "value", "is_seen"),
    [
        ("number", 2, True),
        ("nothing", 3, False),  # made when it was needed
        ("new", [1], False),
        ("nothing", random.Random(), True),  # a generator that goes on from here
        ("numbers", [1, 2], False),
        ("numbers", [1], True),
    ],
)
def test_changes_are_seen_but_not_what_is_only_made(name, value, is_seen) -> None:
    owner = Owner()
    before = snapshot({"": owner})
    setattr(owner, name, value)
    assert bool(changed(before, snapshot({"": owner}))) == is_seen


def test_a_saved_state_can_be_written_to_a_checkpoint(tmp_path) -> None:
    owner = Owner()
    hidden = HiddenState({"sampler": owner}, OF_SAMPLERS)
    owner.change()
    saved = hidden.save()
    path = tmp_path / "checkpoint_1"
    checkpointing.save(path, {"loader": saved}, step=1)
    other = Owner()
    loaded = checkpointing.load(path)["loader"]
    HiddenState({"sampler": other}, OF_SAMPLERS).load(loaded)
    assert other.plain() == owner.plain()
    assert other.change() == owner.change()
