"""Several processes divide a pass: each sample once, in the order that one process has."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from modelzoo_trainer import Trainer, TrainingLoop
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.dataloader import PositionedLoader
from modelzoo_trainer.loading.position import EpochSeeds, EpochStart
from modelzoo_trainer.loading.train_data import TrainData
from tests.distributed.data_runs import (
    DividedBackend,
    Numbers,
    Part,
    flat,
    number_loader,
    passes,
    together,
)
from tests.distributed.ranks import run_ranks, try_ranks

pytestmark = pytest.mark.slow

# CI: three processes, among which hardly anything divides.
SOAK = pytest.mark.soak
ranks = pytest.mark.parametrize(
    "count", [pytest.param(2, marks=SOAK), 3, pytest.param(4, marks=SOAK)]
)
CASES = [
    {"num": num, "size": size, "drop_last": drop_last, "shuffle": shuffle}
    for num in range(1, 41)
    for size in range(1, 5)
    for drop_last in (False, True)
    for shuffle in (False, True)
]
PADDED = [{"num": num, "size": 2} for num in range(1, 30)]
FOR_ALL = [{"num": num, "size": 12, "is_global": True, "shuffle": True} for num in range(1, 41)]
ITEMS = [{"num": num, "size": None} for num in range(1, 20)]
LISTS = [*({"sizes": [2] * num} for num in range(1, 14)), {"sizes": [3, 1, 3, 3, 2]}]
SPLIT = [{"num": num, "size": 5, "micro_batch_size": 2, "shuffle": True} for num in range(1, 40)]
Passes = Callable[[int], dict[str, list[Any]]]


def list_of(rank: int, count: int, *, sizes: list[int]) -> list[torch.Tensor]:
    return [torch.full((size,), float(number)) for number, size in enumerate(sizes)]


def pass_all(rank: int) -> dict[str, list[list[Any]]]:
    """Return what `passes` returns for each list of cases."""
    return {
        "padded": passes(rank, number_loader, PADDED),
        "for all": passes(rank, number_loader, FOR_ALL),
        "not batched": passes(rank, number_loader, ITEMS),
        "list": passes(rank, list_of, LISTS),
        "split": passes(rank, number_loader, SPLIT),
    }


@pytest.fixture(scope="module")
def seen() -> Passes:
    """A function that returns what each of `count` processes sees in all passes, of one start."""

    @cache
    def find(count: int) -> dict[str, list[Any]]:
        results = run_ranks(count, pass_all)
        return {name: [found[name] for found in results] for name in results[0]}

    return find


def one_process(cases: list[dict[str, Any]], factor: int) -> list[list[list[float]]]:
    """Return the batches of one process, with batches of all processes' size."""
    seeds = EpochSeeds.of(DividedBackend(0, 1), 0)
    found = []
    for case in cases:
        loader = number_loader(0, 1, **(case | {"size": case["size"] * factor}))
        items = PositionedLoader(loader).begin(EpochStart(epoch=0, batch_idx=0, seeds=seeds))
        found.append([batch.tolist() for batch, _, _ in items])
    return found


def by_case(results: list[list[Any]]) -> list[list[Any]]:
    return [list(parts) for parts in zip(*results, strict=True)]


@pytest.mark.slow_cases("2", "3", "4")
@ranks
def test_their_batches_are_those_of_one_process_with_as_many_samples(count: int) -> None:
    results = run_ranks(count, passes, number_loader, CASES)
    assert [together(parts) for parts in by_case(results)] == one_process(CASES, count)


@ranks
def test_padding_is_what_is_missing_to_a_sample_for_each(seen: Passes, count: int) -> None:
    cases, results = PADDED, seen(count)["padded"]
    num_padding = [
        sum(is_padding for part in parts for _, _, is_padding, _ in part)
        for parts in by_case(results)
    ]
    rest = [case["num"] % (2 * count) for case in cases]
    assert num_padding == [max(count - left, 0) if left else 0 for left in rest]


@pytest.mark.slow_cases("2")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_load_the_same(workers: int) -> None:
    cases = [{"num": 23, "size": 3, "shuffle": True, "workers": workers}]
    results = run_ranks(2, passes, number_loader, cases)
    assert [together(parts) for parts in by_case(results)] == one_process(
        [{"num": 23, "size": 3, "shuffle": True}], 2
    )


@ranks
def test_a_batch_for_all_is_divided(seen: Passes, count: int) -> None:
    results = seen(count)["for all"]
    expected = one_process([{"num": num, "size": 12, "shuffle": True} for num in range(1, 41)], 1)
    assert [together(parts) for parts in by_case(results)] == expected


@pytest.mark.slow_cases("4")
@ranks
def test_items_that_are_not_batched_are_divided(seen: Passes, count: int) -> None:
    results = by_case(seen(count)["not batched"])
    for case, parts in zip(ITEMS, results, strict=True):
        assert flat(together(parts)) == list(range(case["num"]))


@ranks
def test_a_list_is_divided(seen: Passes, count: int) -> None:
    results = by_case(seen(count)["list"])
    for case, parts in zip(LISTS, results, strict=True):
        given = [float(idx) for idx, size in enumerate(case["sizes"]) for _ in range(size)]
        assert flat(together(parts)) == given
        last = float(len(case["sizes"]) - 1)
        padding = [values for part in parts for _, values, is_padding, _ in part if is_padding]
        assert len(padding) == -len(case["sizes"]) % count
        assert {value for values in padding for value in values} <= {last}


def unequal(rank: int, count: int, *, lengths: list[int], size: int = 1) -> Part:
    return Part(*(100 * rank + number for number in range(lengths[rank])), size=size + (rank == 9))


def test_iterables_of_unequal_length_end_together() -> None:
    cases = [{"lengths": [3, 1, 5]}, {"lengths": [2, 2, 2]}, {"lengths": [1, 4, 1]}]
    results = by_case(run_ranks(3, passes, unequal, cases))
    assert [len(parts[0]) for parts in results] == [5, 2, 4]
    for case, parts in zip(cases, results, strict=True):
        assert sorted(flat(together(parts))) == [
            100.0 * rank + number for rank in range(3) for number in range(case["lengths"][rank])
        ]
    padding = [values for _, values, is_padding, _ in results[0][1] if is_padding]
    assert padding == [[100.0]] * 4


def test_an_iterable_without_a_batch_is_refused_everywhere() -> None:
    results = try_ranks(2, passes, unequal, [{"lengths": [2, 0]}])
    assert [ok for ok, _ in results] == [False, False]
    assert all("yields no batch for data shard 1 of 2" in said for _, said in results)


def test_iterables_without_a_batch_anywhere_have_none() -> None:
    assert run_ranks(2, passes, unequal, [{"lengths": [0, 0]}]) == [[[]], [[]]]


def divided_by_the_user(rank: int, count: int, *, num: int) -> DataLoader[Any]:
    data = Numbers(num)
    return DataLoader(data, 2, sampler=DistributedSampler(data, count, rank, shuffle=False))


def test_what_the_user_has_divided_is_not_divided_again() -> None:
    [first], [second] = run_ranks(2, passes, divided_by_the_user, [{"num": 9}])
    assert [values for _, values, _, _ in first] == [[0.0, 2.0], [4.0, 6.0], [8.0]]
    assert [values for _, values, _, _ in second] == [[1.0, 3.0], [5.0, 7.0], [0.0]]
    assert [is_even for *_, is_even in first + second] == [True] * 6


def short(batch: list[torch.Tensor]) -> torch.Tensor:
    """Put together all but the samples that are multiples of three."""
    return torch.stack([sample for sample in batch if sample % 3])


def filtered(rank: int, count: int, *, num: int) -> DataLoader[Any]:
    return DataLoader(Numbers(num), 4, collate_fn=short)


def test_a_collation_that_changes_the_number_of_samples_is_noticed() -> None:
    [parts] = by_case(run_ranks(2, passes, filtered, [{"num": 16}]))
    assert together(parts) == [[1, 2, 4, 5, 7], [8, 10, 11, 13, 14]]
    assert [is_even for *_, is_even in parts[0]] == [False, False]


def seldom_short(batch: list[torch.Tensor]) -> torch.Tensor:
    """Put together all but the samples that are multiples of sixteen."""
    return torch.stack([sample for sample in batch if sample % 16])


def seldom_filtered(rank: int, count: int, *, num: int) -> DataLoader[Any]:
    return DataLoader(Numbers(num), 4, collate_fn=seldom_short)


def test_a_collation_that_changed_a_number_is_not_trusted_later() -> None:
    parts = by_case(run_ranks(2, passes, seldom_filtered, [{"num": 24}]))[0]
    assert [is_even for *_, is_even in parts[0]] == [False, True, False]


@ranks
def test_all_split_a_batch_into_the_same_number_of_parts(seen: Passes, count: int) -> None:
    results = by_case(seen(count)["split"])
    for case, parts in zip(SPLIT, results, strict=True):
        assert sorted(flat(together(parts))) == list(range(case["num"]))
        assert all(len(values) <= 2 for part in parts for _, values, _, _ in part)


@pytest.mark.slow
@ranks
def test_iterables_split_batches_of_unequal_size_into_as_many_parts(count: int) -> None:
    cases = [{"lengths": [2, 1, 3, 2], "micro_batch_size": 3, "size": 7}]
    [parts] = by_case(run_ranks(count, passes, unequal, cases))
    lengths = cases[0]["lengths"][:count]
    assert len(parts[0]) == 3 * max(lengths)
    assert len(flat(together(parts))) == 7 * sum(lengths)


def test_a_size_that_the_processes_cannot_divide_is_refused() -> None:
    loader = number_loader(0, 4, 20, 10, is_global=True)
    with pytest.raises(ConfigError) as caught:
        TrainData(loader, None, DividedBackend(0, 4))
    facts = ("train_dataloader: a batch size of 10 over all processes", "4 processes", "8 or 12")
    assert [fact for fact in facts if fact not in str(caught.value)] == []


def test_a_mark_on_what_cannot_be_divided_is_refused() -> None:
    loader = Part(1, 2)
    loader.is_global_batch = True
    with pytest.raises(ConfigError, match=r"^train_dataloader \(Part\) has is_global_batch set"):
        TrainData(loader, None, DividedBackend(0, 2))


class Ending(Dataset[torch.Tensor]):
    """Raises StopIteration for a sample of the second process's second batch."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, idx: int) -> torch.Tensor:
        return torch.ones(()) if idx != 6 else next(iter(()))


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.weight * batch.mean()


def fit_ending(rank: int, folder: Path, workers: int) -> None:
    trainer = Trainer(
        device="cpu",
        model=Mean,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(num_epochs=2),
        model_dir=folder,
        seed=1,
        progress="none",
    )
    trainer.fit(DataLoader(Ending(), batch_size=2, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_iteration_of_one_process_ends_all_with_an_error(tmp_path, workers) -> None:
    results = try_ranks(2, fit_ending, tmp_path, workers)
    assert [ok for ok, _ in results] == [False, False]
    assert "StopIteration was raised by the dataset" in results[1][1]
