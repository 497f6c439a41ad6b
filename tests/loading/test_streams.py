"""Streams: batches that are seeded, states in workers, and parts of several processes."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from modelzoo_trainer.loading.position import EpochSeeds, EpochStart
from modelzoo_trainer.loading.sharded_stream import ShardedStream
from modelzoo_trainer.loading.sharding import WHOLE, Split
from modelzoo_trainer.loading.sources import make_source, split_of
from modelzoo_trainer.loading.streams import StreamSource, is_stream

NUM = 26


class Numbers(IterableDataset):
    """The numbers from 0 on."""

    def __iter__(self) -> Iterator[float]:
        return iter(map(float, range(NUM)))


class Random(IterableDataset):
    """Random numbers of python's, numpy's and torch's generators, one after the other."""

    def __iter__(self) -> Iterator[float]:
        for _ in range(NUM):
            yield random.random() + float(torch.rand(()))


class FromAnywhere:
    """A range of numbers that notes where it is begun."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[float]:
        return self.iter_from(0)

    def iter_from(self, index: int) -> Iterator[float]:
        self.begun.append(index)
        return iter(map(float, range(index, NUM)))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Sharded(Numbers):
    """Numbers of which each worker takes its part, as torch's documentation has it."""

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        found = list(super().__iter__())
        return iter(found if info is None else found[info.id :: info.num_workers])


class Position(Numbers):
    """Knows its position; each worker has a part."""

    def __init__(self) -> None:
        self.position = 0
        self.loaded: list[dict[str, int]] = []

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        step, first = (1, 0) if info is None else (info.num_workers, info.id)
        while self.position * step + first < NUM:
            self.position += 1
            yield float((self.position - 1) * step + first)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded.append(state)
        self.position = state["position"]


class Iterators(IterableDataset):
    """One whose iterators have a state, as torchdata's loader has it."""

    def __iter__(self) -> Counting:
        return Counting()


class Counting(Iterator[float]):
    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> float:
        if self.position == NUM:
            raise StopIteration
        self.position += 1
        return float(self.position - 1)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def start_of(epoch: int = 0, batch_idx: int = 0, **more: Any) -> EpochStart:
    seeds = EpochSeeds(order=5 + epoch, samples=9 + epoch, fetches=0)
    return EpochStart(epoch=epoch, batch_idx=batch_idx, seeds=seeds, **more)


def values(source: Any, start: EpochStart) -> list[Any]:
    found = [batch.tolist() for _, batch in source.begin(start)]
    source.close()
    return found


def source_of(dataset: Any, size: int | None = 4, **options: Any) -> Any:
    loader = DataLoader(dataset, size, **options)
    assert is_stream(loader)
    return make_source(loader, WHOLE, lambda value: [value], "train_dataloader")


# ---- seeds


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1}])
@pytest.mark.slow_cases(every=4)
def test_an_epoch_is_the_same_again_and_others_are_other_ones(options) -> None:
    source = source_of(Random(), **options)
    first, second = values(source, start_of()), values(source, start_of(epoch=1))
    assert values(source, start_of()) == first != second


def test_persistent_workers_are_seeded_in_each_epoch() -> None:
    source = source_of(Random(), num_workers=2, persistent_workers=True)
    whole = [[batch.tolist() for _, batch in source.begin(start_of(epoch))] for epoch in (0, 1)]
    source.close()
    resumed = source_of(Random(), num_workers=2, persistent_workers=True)
    assert values(resumed, start_of(epoch=1, batch_idx=3, restores=True)) == whole[1][3:]


# ---- states


@pytest.mark.slow_cases("Position-2", every=4)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [Position, Iterators])
def test_a_state_is_taken_after_each_batch_and_restored_in_the_workers(make, num_workers) -> None:
    if make is Iterators and num_workers:
        num_workers = 1  # each worker yields all
    source = source_of(make(), num_workers=num_workers)
    items = source.begin(start_of())
    whole = [batch.tolist() for _, batch in items]
    source.close()
    for position in range(1, len(whole)):
        source = source_of(make(), num_workers=num_workers)
        items = source.begin(start_of())
        for _ in range(position):
            next(items)
        state = source.state(position)
        source.close()
        assert position - state["rounds"]["batch_idx"] < max(1, num_workers)
        again = source_of(make(), num_workers=num_workers)
        start = start_of(batch_idx=position, restores=True, loader_state=state)
        assert values(again, start) == whole[position:]


def test_a_state_of_other_workers_is_not_used_and_said(caplog) -> None:
    state = {"rounds": {"batch_idx": 2, "states": [{"position": 4}] * 2}}
    source = source_of(Position(), num_workers=0)
    start = start_of(batch_idx=2, restores=True, loader_state=state)
    assert values(source, start)[0] == [8.0, 9.0, 10.0, 11.0]
    [said, more] = [record.getMessage() for record in caplog.records]
    assert "was 2 at the checkpoint and is now 1" in said
    assert "2 batches are loaded and dropped" in more


def test_the_state_of_an_earlier_version_is_restored() -> None:
    state = {"batch_idx": 3, "state": {"position": 12}, "is_cut": False}
    source = source_of(Position())
    start = start_of(batch_idx=3, restores=True, loader_state=state)
    assert values(source, start)[0] == [12.0, 13.0, 14.0, 15.0]
    assert source.loader.dataset.loaded == [{"position": 12}]


# ---- what is loaded again


def test_other_batches_than_before_the_checkpoint_are_warned_of(caplog) -> None:
    numbers = itertools.count()

    class Other(Numbers):
        def __iter__(self):
            return iter([float(next(numbers)) for _ in range(NUM)])

    source = source_of(Other())
    items = source.begin(start_of())
    next(items), next(items)
    state = source.state(2)
    again = source_of(Other())
    values(again, start_of(batch_idx=2, restores=True, loader_state=state))
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "2 batches are loaded and dropped" in said[0]
    assert said[1].startswith("The resumed run may differ: train_dataloader (DataLoader) does not")
    assert len(said) == 2


def test_an_error_says_which_batch_of_which_epoch_it_was() -> None:
    class Broken(Numbers):
        def __iter__(self):
            yield from range(9)
            raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone") as caught:
        values(source_of(Broken()), start_of(epoch=3))
    assert caught.value.__notes__ == ["raised while train_dataloader loaded batch 2 of epoch 4"]


@pytest.mark.parametrize("seed", [None, 5])
def test_a_stream_of_hugging_face_shuffled_without_a_seed_is_warned_of(caplog, seed) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": [float(i) for i in range(NUM)]})
    stream = table.to_iterable_dataset(num_shards=2).shuffle(seed=seed, buffer_size=8)
    source = source_of(stream.with_format("torch"), 2)
    for epoch in range(2):
        assert len([batch for _, batch in source.begin(start_of(epoch))]) == 13
    said = [text for text in caplog.messages if "resumed run may differ" in text]
    assert ["without a seed" in text for text in said] == [True] * (seed is None)


# ---- several processes


def part(dataset: Any, size: int, split: Split, position: int = 0, **options: Any) -> list[Any]:
    """Return (numbers, sizes, is it padding) of what one of several processes gets."""
    loader = DataLoader(ShardedStream(dataset), size, **options)
    if split.is_global:
        loader.is_global_batch = True
    assert split_of(loader, (split.index, split.count), "train_dataloader") == split
    source = StreamSource(loader, split, "train_dataloader")
    items = source.begin(start_of(batch_idx=position, offset=position * split.per_batch))
    found = [
        (number, part.batch.tolist(), part.info.sizes, part.info.is_padding)
        for number, part in items
    ]
    source.close()
    return found


def whole(parts: list[list[Any]]) -> list[float]:
    """Return the samples of all processes in the order of the stream."""
    assert len({len(one) for one in parts}) == 1
    found: list[float] = []
    for group in zip(*parts, strict=True):
        assert len({(number, sizes) for number, _, sizes, _ in group}) == 1
        for (_, samples, _, is_padding), size in zip(group, group[0][2], strict=True):
            assert len(samples) == max(1, size)
            assert is_padding == (size == 0)
            found += [] if is_padding else samples
    return found


ALL = [float(i) for i in range(NUM)]


@pytest.mark.slow_cases("4-2-2", "3-8-2", every=4)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("count", "size"), [(2, 4), (3, 3), (4, 2), (3, 8)])
def test_each_process_gets_its_part_of_a_sharded_stream(count, size, num_workers) -> None:
    parts = [
        part(Sharded(), size, Split(index, count), num_workers=num_workers)
        for index in range(count)
    ]
    assert whole(parts) == ALL


def test_a_process_that_gets_no_sample_of_the_last_batch_has_a_padding_batch() -> None:
    parts = [part(Numbers(), 5, Split(index, 5)) for index in range(5)]
    assert whole(parts) == ALL
    assert [one[-1][3] for one in parts] == [True, True, True, True, False]


def test_with_drop_last_a_smaller_batch_of_all_is_dropped() -> None:
    parts = [part(Numbers(), 4, Split(index, 2), drop_last=True) for index in range(2)]
    assert whole(parts) == ALL[:24]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_of_all_is_divided(num_workers) -> None:
    parts = [
        part(Numbers(), 6, Split(index, 3, is_global=True), num_workers=num_workers)
        for index in range(3)
    ]
    assert whole(parts) == ALL
    assert len(parts[0][0][1]) == 2


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_plain_loader_over_a_sharded_stream_has_each_sample_once(num_workers) -> None:
    loader = DataLoader(ShardedStream(Numbers()), 4, num_workers=num_workers)
    assert sorted(sample for batch in loader for sample in batch.tolist()) == ALL


def test_a_sharded_stream_is_divided_in_persistent_workers_in_each_epoch() -> None:
    loader = DataLoader(ShardedStream(Numbers()), 4, num_workers=2, persistent_workers=True)
    source = make_source(loader, WHOLE, lambda value: [value], "train_dataloader")
    for epoch in range(3):
        found = [sample for _, batch in source.begin(start_of(epoch)) for sample in batch.tolist()]
        assert found == ALL
    source.close()


def test_a_sharded_stream_begins_at_a_position() -> None:
    parts = [part(Numbers(), 2, Split(index, 3), position=2) for index in range(3)]
    assert whole(parts) == ALL[12:]
    assert parts[0][0][0] == 2
    stream = FromAnywhere()
    assert part(stream, 4, Split(1, 2), position=1)[0][1] == [12.0, 13.0, 14.0, 15.0]
    assert (stream.begun, stream.epochs) == ([8], [0])
