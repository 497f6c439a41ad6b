"""Where all processes have as many samples, nothing is weighed; where not, all is as in one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from modelzoo_trainer.core import GradientAccumulation
from modelzoo_trainer.loading import sharding
from modelzoo_trainer.loading.epochs import EpochIterator
from modelzoo_trainer.loading.position import EpochSeeds, Position, ShardLayout
from modelzoo_trainer.loading.train_data import TrainData
from tests.distributed.data_runs import DividedBackend
from tests.distributed.ranks import run_ranks
from tests.distributed.training import make_trainer, samples

EVEN, SMALLER, REST = (4, 4, 4, 4), (4, 4, 4, 1), (4, 4, 4)
EACH_ENGINE = ["DDP", pytest.param("FSDP2", marks=pytest.mark.slow)]
ENGINES = {"DDP": {}, "FSDP2": {"parallel": {"shard": -1}}}


# ---- batches of a list


def epoch(
    batches: Any, position: Position | None = None, skipped: frozenset[int] = frozenset()
) -> Any:
    """Return an epoch of the second of two processes, and how it was begun."""
    backend = DividedBackend(1, 2)
    data = TrainData(batches, None, backend)
    position = Position(layout=data.layout()) if position is None else position
    begun = data.begin(position, EpochSeeds.of(backend, 0), skipped)
    return EpochIterator(begun, backend.batches), begun


def numbered(*sizes: int) -> list[Tensor]:
    return [torch.full((size,), number) for number, size in enumerate(sizes)]


def seen(one: EpochIterator) -> list[tuple[int, int, bool, bool, bool]]:
    return [
        (idx, int(batch[0]), is_last, one.is_padding, one.is_even)
        for batch, is_last, idx in one.items
    ]


def test_batches_of_a_list_are_as_they_are_where_all_are_even() -> None:
    one, begun = epoch(numbered(*EVEN))
    assert not begun.is_sharded
    assert seen(one) == [(0, 1, False, False, True), (1, 3, True, False, True)]


@pytest.mark.parametrize(
    ("sizes", "last"),
    [(SMALLER, (1, 3, True, False, False)), (REST, (1, 2, True, True, False))],
    ids=["smaller", "rest"],
)
def test_and_come_with_their_sizes_where_one_is_not(sizes, last) -> None:
    one, begun = epoch(numbered(*sizes))
    assert begun.is_sharded
    assert seen(one) == [(0, 1, False, False, True), last]


def test_a_list_that_has_changed_is_looked_at_again() -> None:
    backend, batches = DividedBackend(0, 2), numbered(*EVEN)
    data = TrainData(batches, None, backend)
    seeds, position = EpochSeeds.of(backend, 0), Position(layout=data.layout())
    assert not data.begin(position, seeds).is_sharded
    batches.append(torch.zeros(1))
    assert data.begin(position, seeds).is_sharded


def test_an_even_epoch_begins_in_its_middle_after_what_others_have_consumed() -> None:
    layout = ShardLayout(num_shards=2, per_batch=2, size=None, first=1)
    position = Position(batch_idx=1, layout=layout)
    one, begun = epoch(numbered(*(4,) * 9), position, frozenset([2]))
    assert not begun.is_sharded
    assert seen(one) == [(1, 4, False, False, True), (3, 8, True, False, True)]


# ---- a window of one batch


def count_shares(rank: int, folder: Path, cases: list[tuple[Any, str | None]]) -> list[Any]:
    """Return how many batches were weighed in each case, and how many descriptions were made."""
    found = []
    for number, (sizes, counts) in enumerate(cases):
        weighed: list[float] = []
        made: list[Any] = []
        share, describe = GradientAccumulation._share, sharding.ShardInfo.__init__

        def weigh(self: Any, *args: Any, to: Any = share, into: Any = weighed) -> Any:
            into.append(args[-1])
            return to(self, *args)

        def note(self: Any, *args: Any, to: Any = describe, into: Any = made, **kw: Any) -> None:
            into.append(args)
            to(self, *args, **kw)

        GradientAccumulation._share, sharding.ShardInfo.__init__ = weigh, note  # type: ignore[method-assign]
        try:
            trainer = make_trainer(folder / str(number), counts=counts, epochs=1)
            trainer.fit(batches_of(sizes))
        finally:
            GradientAccumulation._share, sharding.ShardInfo.__init__ = share, describe  # type: ignore[method-assign]
        accumulation = trainer.grad_accum
        idle = [*sorted(accumulation.idle_hooks), accumulation.counts_batches]
        found.append((len(weighed), len(made), idle))
    return found


def test_only_batches_that_are_uneven_or_count_items_are_weighed(tmp_path) -> None:
    idle = ["on_train_batch_end", False]
    cases = [(EVEN, None), (SMALLER, None), (REST, None), (EVEN, "tensor")]
    for found in run_ranks(2, count_shares, tmp_path, cases):
        assert found == [(0, 0, idle), (1, 2, idle), (1, 2, idle), (2, 0, idle)]


# ---- the numbers are those of one process


def batches_of(sizes: tuple[int, ...], per_batch: int = 1) -> list[Any]:
    """Return a list of batches of these sizes, `per_batch` of them put together."""
    inputs, mask = samples(sum(sizes)).tensors
    parts = list(zip(inputs.split(list(sizes)), mask.split(list(sizes)), strict=True))
    return [
        tuple(torch.cat(tensors) for tensors in zip(*parts[at : at + per_batch], strict=True))
        for at in range(0, len(parts), per_batch)
    ]


def train_on(
    rank: int, folder: Path, sizes: tuple[int, ...], per_batch: int, options: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """Train over a list of batches, with validation; return gradients, weights and metrics."""
    trainer = make_trainer(folder, **options)
    trainer.fit(batches_of(sizes, per_batch), batches_of(sizes, per_batch))
    weights = trainer.backend.host_state(dict(trainer.model.named_parameters()))
    values = {name: value.tolist() for name, value in weights.items()}
    return trainer.record.grads, values, trainer.metrics.rows


TRAININGS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "even": (EVEN, {}),
    "smaller": (SMALLER, {}),
    "rest": (REST, {}),
    "tokens": (EVEN, {"counts": "tensor"}),
    "int": (EVEN, {"counts": "int"}),
    "rest of tokens": (REST, {"counts": "tensor"}),
    "windows": ((4, 4, 4, 4, 4, 4), {"accumulate": 2}),
    "token windows": ((4, 4, 4, 4, 4, 1), {"accumulate": 2, "counts": "tensor"}),
}


def train_all(rank: int, folder: Path, engine: str) -> dict[str, tuple[Any, Any, Any]]:
    """Return what `train_on` returns for each of `TRAININGS`."""
    return {
        name: train_on(rank, folder / name, sizes, 1, {**options, "backend": ENGINES[engine]})
        for name, (sizes, options) in TRAININGS.items()
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """A function that returns what two processes find in all trainings, from one start."""
    return cache(lambda engine: run_ranks(2, train_all, tmp_path_factory.mktemp("both"), engine))


@pytest.mark.parametrize("engine", EACH_ENGINE)
@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.slow_cases(every=4)
def test_all_numbers_are_those_of_one(tmp_path, trained, name, engine) -> None:
    sizes, options = TRAININGS[name]
    grads, weights, rows = train_on(0, tmp_path / "alone", sizes, 2, options)
    main, other = (found[name] for found in trained(engine))
    for found in (main, other):
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(grads))
        for name, value in weights.items():
            torch.testing.assert_close(torch.tensor(found[1][name]), torch.tensor(value))
    assert [(step, list(row)) for step, row in main[2]] == [(step, list(row)) for step, row in rows]
    for (_, row), (_, expected) in zip(main[2], rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-12)
    assert other[2] == []


def accumulate_after(rank: int, folder: Path) -> list[Any]:
    """Train in whole batches, then with the same trainer in micro-batches."""
    found = []
    trainer = make_trainer(folder, epochs=1)
    for micro in (None, 3):
        if micro is not None:
            trainer.split_train_batches(micro)
        trainer.fit(DataLoader(samples(13), 4))
        found.append(trainer.record.grads[-1])
    return found


@pytest.mark.slow
def test_micro_batches_after_whole_ones_are_those_of_one(tmp_path) -> None:
    one = make_trainer(tmp_path / "alone", epochs=1)
    expected = []
    for _ in range(2):
        one.fit(DataLoader(samples(13), 8))
        expected.append(one.record.grads[-1])
    for found in run_ranks(2, accumulate_after, tmp_path / "both"):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
