"""A plain torch loader begins anywhere in a pass, with its own options, and loads nothing else."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)

from modelzoo_trainer.loading.dataloader import PositionedLoader, can_be_positioned
from modelzoo_trainer.loading.position import EpochSeeds, EpochStart

NUM = 22


class Noted(Dataset):
    """Writes down, in a file that workers share, which samples are loaded."""

    def __init__(self, path: Path | None = None, num: int = NUM) -> None:
        self.path = path
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, idx: int) -> tuple[int, float, float, float]:
        if self.path is not None:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, f"{idx}\n".encode())
            os.close(descriptor)
        return idx, random.random(), float(np.random.rand()), float(torch.rand(()))

    def loaded(self) -> list[int]:
        return [int(line) for line in self.path.read_text().split()]


def begun(
    positioned: PositionedLoader, epoch: int, start: int, seeds: tuple[int, int], **more: Any
) -> Iterator[tuple[int, Any]]:
    """Begin an epoch; return its numbers and batches."""
    found = EpochSeeds(order=seeds[0], samples=seeds[1], fetches=0)
    items = positioned.begin(
        EpochStart(epoch=epoch, batch_idx=start, offset=start, seeds=found, **more)
    )
    return ((number, batch) for batch, _, number in items)


def taken(loader: DataLoader[Any], epoch: int = 0, start: int = 0, **more: Any) -> list[Any]:
    """Return the numbers and batches of an epoch as plain values."""
    positioned = PositionedLoader(loader)
    try:
        items = begun(positioned, epoch, start, (5 + epoch, 9 + epoch), **more)
        return [(number, plain(batch)) for number, batch in items]
    finally:
        positioned.close()


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@pytest.mark.parametrize("start", [0, 2, 5, 6, 40])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.slow_cases(every=4)
def test_a_pass_goes_on_from_any_position_whatever_loads_it(start, workers) -> None:
    whole = taken(DataLoader(Noted(), batch_size=4, shuffle=True))
    torch.rand(2), random.random(), np.random.rand()
    loader = DataLoader(Noted(), batch_size=4, shuffle=True, num_workers=workers)
    assert taken(loader, start=start) == whole[start:]


@pytest.mark.parametrize("start", [10, 100_000])
@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_is_loaded_to_get_to_a_position(tmp_path, start, workers) -> None:
    dataset = Noted(tmp_path / "loaded", num=4 * start + 10)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers)
    numbers = [number for number, _ in taken(loader, start=start)]
    assert numbers == [start, start + 1, start + 2]
    assert len(dataset.loaded()) == 10


@pytest.mark.parametrize("seeds_each", [False, True])
def test_samples_depend_on_the_batch_size_unless_each_is_seeded(seeds_each) -> None:
    def samples(size: int) -> list[Any]:
        data = Noted()
        data.seed_each_sample = seeds_each
        found = taken(DataLoader(data, batch_size=size, shuffle=True, collate_fn=plain))
        return [sample for _, batch in found for sample in batch]

    assert (samples(3) == samples(7)) == seeds_each
    assert samples(3) == samples(3)


def test_samples_are_others_in_another_pass() -> None:
    loader = DataLoader(Noted(), batch_size=NUM, collate_fn=plain)
    [(_, first)], [(_, second)] = taken(loader), taken(loader, epoch=1)
    assert [sample[0] for sample in first] == [sample[0] for sample in second]
    assert not {sample[1] for sample in first} & {sample[1] for sample in second}


def test_a_sample_that_is_drawn_twice_is_augmented_twice() -> None:
    sampler = RandomSampler(Noted(num=2), replacement=True, num_samples=30)
    loader = DataLoader(Noted(num=2), batch_size=30, sampler=sampler, collate_fn=plain)
    [(_, batch)] = taken(loader)
    assert len({sample[1] for sample in batch}) == 30


def test_batches_are_skipped_without_being_loaded(tmp_path, caplog) -> None:
    dataset = Noted(tmp_path / "loaded")
    caplog.set_level(logging.INFO)
    found = taken(DataLoader(dataset, batch_size=4), start=1, skipped=frozenset({2, 4}))
    assert [number for number, _ in found] == [1, 3, 5]
    assert dataset.loaded() == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21]
    second, fourth = caplog.messages
    assert [fact in second for fact in ("Epoch 1", "batch 2", "8, 9, 10, 11")] == [True] * 3
    assert [fact in fourth for fact in ("Epoch 1", "batch 4", "16, 17, 18, 19")] == [True] * 3


def test_a_long_list_of_samples_is_cut_in_the_log(caplog) -> None:
    caplog.set_level(logging.INFO)
    taken(DataLoader(range(100), batch_size=70), skipped=frozenset({0}))
    assert "62, 63 and 6 more" in caplog.messages[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_without_batches_are_positioned_too(workers) -> None:
    loader = DataLoader(Noted(), batch_size=None, shuffle=True, num_workers=workers)
    whole = taken(DataLoader(Noted(), batch_size=None, shuffle=True))
    assert taken(loader, start=19) == whole[19:]
    assert len(whole) == NUM


def test_persistent_workers_live_on_and_make_the_same_passes() -> None:
    def pids(positioned: PositionedLoader) -> set[int]:
        return {worker.pid for worker in positioned._iterator.workers}

    loader = DataLoader(Noted(), batch_size=4, num_workers=2, persistent_workers=True)
    positioned = PositionedLoader(loader)
    first = begun(positioned, 0, 3, (5, 9))
    next(first)
    known = pids(positioned)
    second = begun(positioned, 1, 2, (6, 10))  # the first pass is not over
    found = [(number, plain(batch)) for number, batch in second]
    assert pids(positioned) == known
    assert found == taken(DataLoader(Noted(), batch_size=4), epoch=1, start=2)
    positioned.close()


def test_persistent_workers_tell_their_data_set_of_each_pass() -> None:
    class Told(Dataset):
        epoch = 0

        def __len__(self):
            return 8

        def __getitem__(self, idx):
            return self.epoch

        def set_epoch(self, epoch):
            self.epoch = epoch

    dataset = Told()
    loader = DataLoader(dataset, batch_size=8, num_workers=1, persistent_workers=True)
    positioned = PositionedLoader(loader)
    seen = []
    for epoch in (4, 5):
        dataset.set_epoch(epoch)  # here; the workers have copies
        items = begun(positioned, epoch, 0, (1, 2))
        seen += [plain(batch)[0] for _, batch in items]
    positioned.close()
    assert seen == [4, 5]


def test_workers_end_with_their_pass_unless_they_are_persistent() -> None:
    positioned = PositionedLoader(DataLoader(Noted(), batch_size=4, num_workers=2))
    items = begun(positioned, 0, 0, (5, 9))
    next(items)
    workers = positioned._iterator.workers
    begun(positioned, 0, 3, (5, 9))
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    positioned.close()
    positioned.close()


def fail(worker_id: int) -> None:
    raise ValueError(f"worker {worker_id} cannot start")


def test_the_options_of_the_loader_are_used() -> None:
    made = DataLoader(
        Noted(),
        batch_size=4,
        num_workers=1,
        timeout=7,
        prefetch_factor=3,
        worker_init_fn=fail,
        multiprocessing_context="spawn",
        in_order=False,
        persistent_workers=True,
        collate_fn=plain,
    )
    own = PositionedLoader(made)._own
    for name in (
        "num_workers",
        "timeout",
        "prefetch_factor",
        "worker_init_fn",
        "multiprocessing_context",
        "in_order",
        "persistent_workers",
        "pin_memory",
        "pin_memory_device",
    ):
        assert getattr(own, name) == getattr(made, name), name
    assert own.collate_fn.collate is plain


def test_the_users_worker_init_fn_is_called_and_sees_the_users_data_set() -> None:
    class Known(Noted):
        def __getitem__(self, idx):
            return self.greeting

    def greet(worker_id: int) -> None:
        get_worker_info().dataset.greeting = f"worker {worker_id}"

    loader = DataLoader(
        Known(), batch_size=11, num_workers=2, worker_init_fn=greet, collate_fn=plain
    )
    assert taken(loader) == [(0, ["worker 0"] * 11), (1, ["worker 1"] * 11)]


def test_an_error_of_a_sample_comes_through() -> None:
    class Broken(Noted):
        def __getitem__(self, idx):
            raise ValueError(f"sample {idx} is broken")

    for workers in (0, 1):
        with pytest.raises(ValueError, match="sample 0 is broken"):
            taken(DataLoader(Broken(), num_workers=workers))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_generators_are_left_as_they_are_by_what_draws_nothing(workers) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    tensors = TensorDataset(torch.arange(9.0))
    loader = DataLoader(tensors, batch_size=2, shuffle=True, num_workers=workers)
    assert not PositionedLoader(loader).seeds_host
    assert len(taken(loader, start=1)) == 4
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == before


def test_whether_a_fetch_seeds_the_generators_is_told() -> None:
    tensors = TensorDataset(torch.arange(9.0))
    assert PositionedLoader(DataLoader(Noted())).seeds_host
    assert PositionedLoader(DataLoader(tensors, collate_fn=plain)).seeds_host
    assert PositionedLoader(DataLoader(tensors, sampler=[1, 2])).seeds_host


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Mine(DataLoader):
    pass


def test_only_plain_loaders_over_samples_with_indices_are_positioned() -> None:
    assert can_be_positioned(DataLoader(Noted()))
    assert not can_be_positioned(DataLoader(Stream()))
    assert not can_be_positioned(Mine(Noted()))
    assert not can_be_positioned([1, 2])


# ---- loading that changes objects


class Changing(Dataset):
    """Samples with an attribute that loading changes."""

    def __init__(self, *, changes: bool) -> None:
        self.changes, self.seen = changes, 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, idx: int) -> torch.Tensor:
        self.seen += self.changes
        return torch.tensor([idx])


class Tokenizer:
    """Notes what it has warned of, as those of transformers do."""

    def __init__(self) -> None:
        self.deprecation_warnings: dict[str, bool] = {}
        self.num_padded = 0


class Padding:
    """A collate function with a tokenizer."""

    def __init__(self, *, counts: bool) -> None:
        self.tokenizer, self.counts = Tokenizer(), counts

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        self.tokenizer.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = False
        self.tokenizer.num_padded += self.counts
        return torch.stack(samples)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("changes", "counts", "named", "left_out"),
    [
        (False, False, [], ["resumed run"]),
        (False, True, ["collate function of", "(Padding)", "num_padded"], ["(Changing)"]),
        (True, False, ["dataset of", "(Changing)", ": seen"], ["collate function", "(Padding)"]),
        (True, True, ["(Changing)", "(Padding)", "seen", "num_padded"], []),
    ],
)
@pytest.mark.slow_cases(every=4)
def test_a_warning_names_what_loading_changes(
    num_workers, changes, counts, named, left_out, caplog
) -> None:
    loader = DataLoader(
        Changing(changes=changes),
        batch_size=2,
        collate_fn=Padding(counts=counts),
        num_workers=num_workers,
    )
    assert len(taken(loader)) == 2
    assert [part for part in named if part not in caplog.text] == []
    assert [part for part in left_out if part in caplog.text] == []
    assert "deprecation_warnings" not in caplog.text
