"""What objects keep in their attributes: found, saved, restored."""

from __future__ import annotations

import logging
import random
import tarfile
import weakref
import zipfile
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from modelzoo_trainer import checkpointing
from modelzoo_trainer.loading.hidden_state import (
    OF_DATA,
    OF_LOADING,
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


class Phase(Enum):
    FIRST = 1
    SECOND = 2


class Attributes(dict):
    """Answers to any name, and raises KeyError for those that it does not have."""

    __getattr__ = dict.__getitem__


class Raising:
    def __init__(self) -> None:
        self.__dict__["value"] = 1

    @property
    def value(self):
        raise RuntimeError("not now")


def odd_owner(tmp_path) -> Any:
    owner = Owner()
    owner.file = open(tmp_path / "file", "w")  # noqa: SIM115  # closed with the owner
    owner.given = (number for number in range(3))
    owner.log = logging.getLogger("test")
    owner.settings = Attributes(lr=1)
    owner.raising = Raising()
    owner.weight = torch.ones(2, requires_grad=True) * 2
    owner.date = np.datetime64("2026-01-01")
    owner.name = np.str_("a")
    owner.table = {"hidden_state": 1}
    return owner


def test_odd_attributes_are_left_as_they_are(tmp_path) -> None:
    owner = odd_owner(tmp_path)
    hidden = HiddenState({"sampler": owner}, OF_SAMPLERS)
    owner.number += 1
    owner.table["hidden_state"] = 2
    saved = hidden.save()
    checkpointing.save(tmp_path / "checkpoint_1", {"loader": saved}, step=1)
    owner.number, owner.table["hidden_state"] = 9, 9
    hidden.load(checkpointing.load(tmp_path / "checkpoint_1")["loader"])
    assert (owner.number, owner.table) == (2, {"hidden_state": 2})
    owner.file.close()


def test_what_changes_and_cannot_be_saved_is_named_and_nothing_is_damaged() -> None:
    owner = Owner()
    owner.phase = Phase.FIRST
    owner.path = Path("a")
    hidden = HiddenState({"sampler": owner}, OF_SAMPLERS)
    owner.phase, owner.path = Phase.SECOND, Path("b")
    saved = hidden.save()
    assert sorted(hidden.newly_unsaved()) == ["sampler.path", "sampler.phase"]
    assert not hidden.newly_unsaved()  # it is warned of once
    HiddenState({"sampler": Owner()}, OF_SAMPLERS).load(saved)
    assert (Phase.FIRST.value, Phase.SECOND.value) == (1, 2)


def test_another_object_in_an_attribute_is_not_written_into_the_one_that_was_there() -> None:
    def made() -> Owner:
        owner = Owner()
        owner.parts = [Inner(), Inner()]
        owner.parts[1].count = 7
        owner.part = owner.parts[0]
        return owner

    owner, other = made(), made()
    hidden = HiddenState({"sampler": owner}, OF_SAMPLERS)
    owner.part = owner.parts[1]
    HiddenState({"sampler": other}, OF_SAMPLERS).load(hidden.save())
    assert hidden.newly_unsaved()
    assert [part.count for part in other.parts] == [0, 7]


@pytest.mark.parametrize(
    "made",
    [
        lambda: random.Random(9),
        lambda: np.random.RandomState(9),
        lambda: np.random.default_rng(9),
        lambda: torch.Generator().manual_seed(9),
        lambda: list(range(100)),
        lambda: {1, 2},
        lambda: deque([1]),
    ],
)
def test_what_was_none_is_made_again(made) -> None:
    owner, other = Owner(), Owner()
    hidden = HiddenState({"sampler": owner}, OF_SAMPLERS)
    owner.nothing = made()
    HiddenState({"sampler": other}, OF_SAMPLERS).load(hidden.save())
    assert type(other.nothing) is type(owner.nothing)


class Growing:
    """Keeps something for each number that it is called with."""

    of_class: list[Any] = []  # noqa: RUF012  # that is a case
    count = 0

    def __init__(self) -> None:
        self.empty: dict[int, Any] = {}
        self.long: list[Any] = [None] * 50_000
        self.room: list[Any] = [None] * 8
        self.objects = np.empty(8, dtype=object)
        self.large = np.zeros(1 << 20)
        self.tensor = torch.zeros(1 << 20)
        self.made: Any = None
        self.inner: Any = Inner()
        kept: list[Any] = []
        self.closure = lambda item: kept.append(item)
        self.partial = partial(kept_by, {})


def kept_by(known: dict[int, Any], item: tuple[int, str]) -> None:
    known[item[0]] = item


def by_key(owner: Growing, number: int) -> None:
    owner.empty[number] = number, "a"


def to_class(owner: Growing, number: int) -> None:
    owner.of_class.append((number, "a"))


def of_class(owner: Growing, number: int) -> None:
    owner.count += 1


def in_item(name: str) -> Callable[[Growing, int], None]:
    def grow(owner: Growing, number: int) -> None:
        getattr(owner, name)[number] = (number, "a") if name != "large" else 1.0

    return grow


def in_tensor(owner: Growing, number: int) -> None:
    owner.tensor[number] = 1.0


def in_closure(owner: Growing, number: int) -> None:
    owner.closure((number, "a"))


def in_partial(owner: Growing, number: int) -> None:
    owner.partial((number, "a"))


def replaced(owner: Growing, number: int) -> None:
    owner.inner = None


CHANGES = [
    *(by_key, to_class, of_class, in_tensor, in_closure, in_partial, replaced),
    *map(in_item, ("long", "room", "objects", "large")),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.slow_cases(every=4)
def test_what_grows_from_nothing_is_seen(monkeypatch, change) -> None:
    monkeypatch.setattr(Growing, "of_class", [])
    owner = Growing()
    before = snapshot({"": owner}, OF_LOADING)
    assert changed(before, snapshot({"": owner}, OF_LOADING)) == []
    change(owner, 3)
    assert len(changed(before, snapshot({"": owner}, OF_LOADING))) == 1


@pytest.mark.parametrize("make", [dict, list, lambda: np.zeros(2), Inner, lambda: [Inner()]])
def test_what_is_made_is_seen_when_it_changes(make) -> None:
    owner = Growing()
    first = snapshot({"": owner}, OF_LOADING)
    owner.made = make()
    second = snapshot({"": owner}, OF_LOADING)
    assert changed(first, second) == []
    if isinstance(owner.made, dict):
        owner.made[1] = 2, "a"
    elif isinstance(owner.made, list):
        owner.made.append(Inner())
    elif isinstance(owner.made, Inner):
        owner.made.count += 1
    else:
        owner.made[0] = 1
    assert changed(second, snapshot({"": owner}, OF_LOADING)) != []


def zipped(folder: Path) -> Any:
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        for number in range(8):
            archive.writestr(str(number), b"abc")
    return zipfile.ZipFile(folder / "a.zip")


def tarred(folder: Path) -> Any:
    (folder / "file").write_bytes(b"abc")
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number in range(8):
            archive.add(folder / "file", str(number))
    return tarfile.open(folder / "a.tar")  # closed with its owner


def stored(folder: Path) -> Any:
    with h5py.File(folder / "a.h5", "w") as file:
        for number in range(8):
            file[str(number)] = np.ones(3)
    return h5py.File(folder / "a.h5")


def optional(name: str) -> Any:
    return pytest.importorskip(name, reason=f"needs {name}")


def saved_arrays(folder: Path) -> Any:
    np.savez(folder / "a.npz", **{str(number): np.ones(3) for number in range(8)})
    return np.load(folder / "a.npz")


READERS: dict[str, tuple[Callable[[Path], Any], Callable[[Any, int], Any]]] = {
    "zip": (zipped, lambda archive, number: archive.read(str(number))),
    "tar": (tarred, lambda archive, number: archive.extractfile(str(number)).read()),
    "hdf5": (stored, lambda file, number: file[str(number)][()]),
    "npz": (saved_arrays, lambda file, number: file[str(number)]),
    "pandas": (
        lambda folder: optional("pandas").DataFrame({"a": range(8)}),
        lambda table, number: (table.a[number], table.loc[number], table[table.a == number]),
    ),
    "datasets": (
        lambda folder: optional("datasets").Dataset.from_dict({"a": [*range(8)]}),
        lambda table, number: table[number],
    ),
    "threads": (lambda folder: ThreadPoolExecutor(1), lambda pool, number: pool.submit(abs, 1)),
    "proxy": (lambda folder: weakref.proxy(Raising()), lambda proxy, number: None),
}


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("name", READERS)
@pytest.mark.slow_cases(every=4)
def test_what_is_read_is_not_taken_for_state(tmp_path, name, is_lazy) -> None:
    make, read = READERS[name]
    owner = Growing()
    owner.made = None if is_lazy else make(tmp_path)
    seen = [snapshot({"": owner}, OF_LOADING)]
    for number in range(4):
        if owner.made is None:
            owner.made = make(tmp_path)
        read(owner.made, number)
        seen.append(snapshot({"": owner}, OF_LOADING))
    assert [changed(*pair) for pair in pairwise(seen)] == [[]] * 4
    if name == "tar":
        owner.made.close()


class Remembering:
    """Counts from a number of its class, and keeps what cannot be saved."""

    count = 0

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}
        self.made: Any = None

    def change(self) -> None:
        self.count += 1
        self.kept[self.count] = self.count, "a"


def test_a_number_of_the_class_is_restored() -> None:
    owner, other = Remembering(), Remembering()
    hidden, restored = (HiddenState({"it": one}, OF_DATA) for one in (owner, other))
    owner.change()
    assert restored.load(hidden.save()) == ["it.kept[1][0]", "it.kept[1][1]"] or other.count == 1
    assert other.count == 1


def test_what_grows_and_cannot_be_saved_is_named_at_once_and_in_the_checkpoint() -> None:
    owner = Remembering()
    hidden = HiddenState({"it": owner}, OF_DATA)
    assert hidden.newly_lost() == []
    owner.change()
    assert hidden.newly_lost() == ["len(it.kept)"]
    hidden.save()
    assert "len(it.kept)" in hidden.unsaved


def test_a_saved_value_that_is_made_again_with_another_value_is_named() -> None:
    owner, other = Remembering(), Remembering()
    hidden, restored = (HiddenState({"it": one}, OF_DATA) for one in (owner, other))
    owner.made = Inner()
    owner.made.count = 2
    saved = hidden.save()
    missing = {path: saved[path] for path in restored.load(saved)}
    other.made = Inner()
    assert restored.differing(missing) == ["it.made.count"]
    other.made.count = 2
    assert restored.differing(missing) == []
