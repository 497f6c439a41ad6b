"""Each of several processes loads its part of a pass, and together they load the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from modelzoo_trainer.loading.sample_order import Draw, draws
from modelzoo_trainer.loading.sharding import (
    Split,
    drops_last,
    even_part,
    is_split_already,
    num_batches,
    shard_draws,
)


class Backwards(Sampler[int]):
    """One that must be asked for each index."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num - 1, -1, -1))

    def __len__(self) -> int:
        return self.num


class Uneven(Sampler[list[int]]):
    """Batches of the user's own, of one to three samples."""

    def __init__(self, num: int) -> None:
        self.batches = []
        start = 0
        while start < num:
            size = start % 3 + 1
            self.batches.append(list(range(start, min(start + size, num))))
            start += size

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def loader_of(kind: str, num: int, size: int = 1, *, drop_last: bool = False) -> DataLoader[Any]:
    data = list(range(num))
    if kind == "uneven":
        return DataLoader(data, batch_sampler=Uneven(num))
    if kind == "backwards":
        return DataLoader(data, size, sampler=Backwards(num), drop_last=drop_last)
    if kind == "single":
        return DataLoader(data, batch_size=None)
    return DataLoader(data, size, shuffle=kind == "shuffled", drop_last=drop_last)


def taken(
    loader: DataLoader[Any], count: int, place: tuple[int, int] = (0, 0), *, is_global: bool = False
) -> list[list[Draw]]:
    """Return what each process loads."""
    return [
        list(shard_draws(loader, Split(index, count, is_global), place, seed=5, epoch=2))
        for index in range(count)
    ]


def in_order(parts: list[list[Draw]]) -> list[Any]:
    """Return the indices of all processes, in the order of the pass; padding left out."""
    found = []
    for group in zip(*parts, strict=True):
        assert len({share.number for share in group}) == 1
        assert len({share.sizes for share in group}) == 1
        for index, share in enumerate(group):
            if share.sizes is not None:
                assert share.is_padding == (share.sizes[index] == 0)
                assert len(share.items) == max(share.sizes[index], 1)
            if not share.is_padding:
                found += share.items if isinstance(share.items, list) else [share.items]
    return found


def whole(loader: DataLoader[Any]) -> list[Any]:
    """Return the indices of a pass of one process."""
    found = []
    for draw in draws(loader, seed=5, epoch=2, start=0):
        found += draw.items if isinstance(draw.items, list) else [draw.items]
    return found


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["plain", "shuffled", "backwards"])
@pytest.mark.slow_cases(every=4)
def test_a_pass_has_each_sample_once_in_the_order_of_one_process(kind, drop_last, count) -> None:
    for num in range(1, 41):
        for size in range(1, 5):
            loader = loader_of(kind, num, size, drop_last=drop_last)
            parts = taken(loader, count)
            kept = num - num % (size * count) if drop_last else num
            assert in_order(parts) == whole(loader_of(kind, num, size))[:kept]
            drops = drops_last(loader)
            assert len(parts[0]) == num_batches(len(loader), Split(0, count), drops=drops)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", ["plain", "shuffled", "backwards"])
def test_batches_of_all_processes_are_those_of_one_with_as_many_samples(kind, count) -> None:
    for num in range(1, 41):
        parts = taken(loader_of(kind, num, 3), count)
        one = list(draws(loader_of(kind, num, 3 * count), seed=5, epoch=2, start=0))
        assert [sum(share.sizes or ()) for share in parts[0]] == [len(draw.items) for draw in one]
        assert [share.number for share in parts[0]] == [draw.number for draw in one]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", ["plain", "shuffled", "backwards"])
def test_a_batch_for_all_is_cut_into_slices(kind, count) -> None:
    for num in range(1, 41):
        loader = loader_of(kind, num, 12)
        parts = taken(loader, count, is_global=True)
        assert in_order(parts) == whole(loader)
        assert len(parts[0]) == num_batches(
            len(loader), Split(0, count, is_global=True), drops=False
        )
        assert [share.sizes for share in parts[0]][:-1] == [(12 // count,) * count] * (
            (num - 1) // 12
        )


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", ["uneven", "single"])
def test_draws_of_the_users_own_are_divided(kind, count) -> None:
    for num in range(1, 41):
        loader = loader_of(kind, num)
        assert sorted(in_order(taken(loader, count))) == list(range(num))


def test_the_last_batch_is_divided_evenly() -> None:
    parts = taken(loader_of("plain", 11, 3), 2)
    assert [[share.items for share in part] for part in parts] == [
        [[0, 1, 2], [6, 7]],
        [[3, 4, 5], [8, 9, 10]],
    ]
    assert [share.sizes for share in parts[0]] == [(3, 3), (2, 3)]


def test_a_process_without_a_sample_gets_one_of_somebody_elses() -> None:
    parts = taken(loader_of("plain", 5, 2), 4)
    assert [[share.items for share in part] for part in parts] == [[[0]], [[1]], [[2]], [[3, 4]]]
    parts = taken(loader_of("plain", 9, 2), 4)
    assert [part[1].items for part in parts] == [[8]] * 4
    assert [part[1].is_padding for part in parts] == [True, True, True, False]


def test_remaining_draws_of_the_users_own_are_divided_evenly() -> None:
    loader = DataLoader(list(range(9)), batch_sampler=[[0, 1], [2], [3, 4], [5], [6, 7, 8]])
    parts = taken(loader, 2)
    assert [[share.items for share in part] for part in parts] == [
        [[0, 1], [3, 4], [6]],
        [[2], [5], [7, 8]],
    ]
    assert [share.sizes for share in parts[1]] == [(2, 1), (2, 1), (1, 2)]


def test_items_that_are_not_batched_end_with_padding_of_unknown_size() -> None:
    parts = taken(loader_of("single", 5), 3)
    assert [[share.items for share in part] for part in parts] == [[0, 3], [1, 4], [2, 3]]
    assert [share.is_padding for share in parts[2]] == [False, True]
    assert {share.sizes for part in parts for share in part} == {None}


@pytest.mark.parametrize("kind", ["plain", "shuffled", "backwards", "uneven", "single"])
def test_a_pass_goes_on_after_any_number_of_draws_with_another_number_of_processes(kind) -> None:
    num, size = 23, 2
    loader = loader_of(kind, num, size)
    given = whole(loader)
    order = list(draws(loader, seed=5, epoch=2, start=0))
    for count in (2, 3, 4):
        for offset in range(len(order)):
            before = sum(
                len(draw.items) if isinstance(draw.items, list) else 1 for draw in order[:offset]
            )
            parts = taken(loader, count, (offset // count, offset))
            assert sorted(in_order(parts)) == sorted(given[before:])
            assert parts[0][0].number == offset // count


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(10), replacement=True, num_samples=22),
        WeightedRandomSampler([0.1] * 10, 22),
    ],
)
def test_the_place_of_a_sample_that_comes_twice_does_not_depend_on_who_loads_it(sampler) -> None:
    loader = DataLoader(list(range(10)), 3, sampler=sampler)
    one = [
        (draw.position + i, item)
        for draw in draws(loader, seed=5, epoch=2, start=0)
        for i, item in enumerate(draw.items)
    ]
    several = [
        (share.position + i, item)
        for part in taken(loader, 3)
        for share in part
        for i, item in enumerate(share.items)
        if not share.is_padding
    ]
    assert sorted(several) == one


def test_a_sampler_that_divides_the_samples_is_found() -> None:
    class Own(Backwards):
        num_replicas, rank = 2, 1

    data = list(range(8))
    divided = DistributedSampler(data, num_replicas=2, rank=0)
    whole = DistributedSampler(data, num_replicas=1, rank=0)
    assert is_split_already(DataLoader(data, sampler=divided))
    assert is_split_already(DataLoader(data, batch_sampler=BatchSampler(Own(8), 2, False)))
    assert not is_split_already(DataLoader(data, sampler=whole))
    assert not is_split_already(DataLoader(data, shuffle=True))


def rows(*sizes: int) -> list[Any]:
    """Return batches of these sizes, each with its number."""
    return [torch.full((size,), number) for number, size in enumerate(sizes)]


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize(("first", "numbers"), [(0, [1, 4]), (3, [4])])
def test_the_part_of_a_list_of_equal_batches_is_every_nth(kind, first, numbers) -> None:
    batches = rows(2, 2, 2, 2, 2, 2)
    found = even_part(kind(batches), Split(1, 3), first)
    assert [int(batch[0]) for batch in found] == numbers


class Lazy(list[Any]):
    """One whose batches are made when they are asked for."""


@pytest.mark.parametrize(
    "loader",
    [
        rows(2, 2, 2),  # one process has none of the last batch
        rows(2, 2, 2, 1),
        Lazy(rows(2, 2)),
        DataLoader(list(range(8)), 2),
        iter(rows(2, 2)),
    ],
    ids=["rest", "smaller", "lazy", "DataLoader", "iterator"],
)
def test_what_may_be_uneven_has_no_even_part(loader) -> None:
    assert even_part(loader, Split(0, 2)) is None


def test_draws_before_the_first_batch_are_no_part_of_what_is_divided() -> None:
    assert even_part(rows(2, 2, 2, 2), Split(0, 2), first=1) is None
    assert len(even_part(rows(2, 2, 2, 2, 2), Split(0, 2), first=1)) == 2
