"""Passes and trainings of one of several processes, for tests of how they divide the data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from backends.comm import Comm
from backends.cpu import CpuBackend
from modelzoo_trainer import Callback
from modelzoo_trainer.loading.epochs import EpochIterator
from modelzoo_trainer.loading.position import EpochSeeds, Position
from modelzoo_trainer.loading.train_data import TrainData
from tests.doubles import Scale, make_trainer

Seen = tuple[int, list[float], bool, bool]


class NumbersOnly(Comm):
    """One of several processes, which exchange numbers and nothing else."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.data_shard = (index, count)
        self.num_exchanged = 0

    @override
    def gather_from_shards(self, value: int) -> list[int]:
        self.num_exchanged += 1
        told: list[Any] = [None] * self.data_shard[1]
        dist.all_gather_object(told, value)
        return told


class DividedBackend(CpuBackend):
    """That of one of several processes."""

    comm: NumbersOnly

    def __init__(self, index: int, count: int) -> None:
        self.place = (index, count)
        super().__init__()

    @override
    def _make_comm(self) -> NumbersOnly:
        return NumbersOnly(*self.place)


class Numbers(Dataset[Tensor]):
    """The numbers from 0 on."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, idx: int) -> Tensor:
        return torch.tensor(float(idx))


class Part:
    """An iterable of batches of which each process has others; with a state, if it is asked for."""

    def __init__(self, *values: float, size: int = 1) -> None:
        self.batches = [torch.full((size,), float(value)) for value in values]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class PartWithState:
    """Likewise, with a state of its own."""

    def __init__(self, *values: float) -> None:
        self.values = values
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < len(self.values):
            self.position += 1
            yield torch.full((1,), float(self.values[self.position - 1]))
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Log(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Watcher(Callback):
    """Writes down what every batch is."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.validated: list[Seen] = []
        self.parts: list[int] = []

    @override
    def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        data = trainer.data
        self.parts.append(data.num_parts)
        self.seen.append((batch_idx, batch.tolist(), data.is_padding, data.is_even))

    @override
    def on_validate_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        data = trainer.val_iterator
        self.validated.append((batch_idx, batch.tolist(), data.is_padding, data.is_even))


def join() -> tuple[int, int]:
    """Join the processes of the test; return this one's rank, and how many there are."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def passes(rank: int, make: Callable[..., Any], cases: list[dict[str, Any]]) -> list[list[Seen]]:
    """Return what each batch of a pass is.

    Args:
        rank: Of the process.
        make: Called with rank, number of processes and a case: returns the loader.
        cases: One for each pass.
    """
    place = join()
    found = []
    for case in cases:
        options = dict(case)
        size = options.pop("micro_batch_size", None)
        backend = DividedBackend(*place)
        feed = TrainData(make(*place, **options), None, backend)
        position = Position(layout=feed.layout())
        begun = feed.begin(position, EpochSeeds.of(backend, 0), needs_sizes=size is not None)
        one = EpochIterator(begun, backend.batches, micro_batch_size=size)
        found.append(
            [
                (idx, batch.flatten().tolist(), one.is_padding, one.is_even)
                for batch, _, idx in one.items
            ]
        )
        one.close()
    return found


def train(
    rank: int, folder: Path, make: Callable[..., Any], runs: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Train once for each of `runs`; return what was seen, and the state of the data.

    Args:
        rank: Of the process.
        folder: Where each has a folder of its own.
        make: Called with rank and number of processes: returns the loader.
        runs: Arguments of the trainer; `state` is a state of the data to begin with, `path` a
            checkpoint, `saves` whether to write one at the end, `val` whether to validate,
            `micro_batch_size` as its name says.
    """
    place = join()
    results = []
    for number, run in enumerate(runs):
        settings = dict(run)
        state, val = settings.pop("state", None), settings.pop("val", None)
        path, size = settings.pop("path", None), settings.pop("micro_batch_size", None)
        saves = settings.pop("saves", False)
        watcher, log = Watcher(), Log()
        backend = DividedBackend(*place)
        trainer = make_trainer(
            folder / f"{number}_{rank}_of_{place[1]}",
            watcher,
            **({"model": Scale, "device": None, "backend": backend, "max_steps": 100} | settings),
        )
        logging.getLogger("modelzoo_trainer.data").addHandler(log)
        if size is not None:
            trainer.split_train_batches(size)
        if state is not None:
            trainer.data.on_load_checkpoint(trainer, {"dataloader": state})
        trainer.fit(make(*place), None if val is None else make(*place), ckpt_path=path)
        logging.getLogger("modelzoo_trainer.data").removeHandler(log)
        saved: dict[str, Any] = {}
        trainer.data.on_save_checkpoint(trainer, saved)
        results.append(
            {
                "seen": watcher.seen,
                "validated": watcher.validated,
                "parts": watcher.parts,
                "state": saved["dataloader"],
                "path": trainer.save_checkpoint() if saves else None,
                "epoch": trainer.data.epoch,
                "num_exchanged": backend.comm.num_exchanged,
                "warnings": log.lines,
            }
        )
        trainer.close()
    return results


def number_loader(
    rank: int,
    count: int,
    num: int,
    size: int | None = 1,
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    workers: int = 0,
    is_global: bool = False,
) -> DataLoader[Any]:
    """Return a loader of numbers, the same for all processes."""
    loader: DataLoader[Any] = DataLoader(
        Numbers(num), size, shuffle=shuffle, drop_last=drop_last, num_workers=workers
    )
    if is_global:
        loader.is_global_batch = True
    return loader


def together(parts: list[list[Seen]]) -> list[list[float]]:
    """Return what all processes have of each batch, in their order, without padding.

    Args:
        parts: What each process has seen.
    """
    assert len({len(part) for part in parts}) == 1
    found = []
    for group in zip(*parts, strict=True):
        assert len({idx for idx, *_ in group}) == 1
        assert len({is_even for *_, is_even in group}) == 1
        sizes = [0 if is_padding else len(values) for _, values, is_padding, _ in group]
        assert group[0][3] == (len(set(sizes)) == 1)
        found.append([x for _, values, is_padding, _ in group if not is_padding for x in values])
    return found


def flat(batches: list[list[float]]) -> list[float]:
    """Return the values of all batches."""
    return [value for batch in batches for value in batch]
