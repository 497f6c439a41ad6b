"""Random seeds of a batch, derived from its position in the data."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from modelzoo_trainer.loading.batch_dataset import BatchDataset, already_a_batch, collate_samples
from modelzoo_trainer.loading.dataset_state import DatasetObserver

_ALL: Final = (1 << 64) - 1
_SEEDS: Final = (1 << 62) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15


def mixed(base: int, *numbers: int) -> int:
    """Return a 62-bit seed that depends on all of the numbers, of any size and sign.

    Each is mixed in with the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable
    pseudorandom number generators, OOPSLA 2014), so that close inputs give unrelated seeds.
    """
    x = base
    for number in numbers:
        x = (x + _GAMMA * (number + 1)) & _ALL
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _ALL
        x ^= x >> 31
    return x & _SEEDS


def spread(base: int, number: int) -> int:
    """Return a 62-bit seed for a number, given a `mixed` base; ten times as fast as `mixed`.

    Seeds of consecutive numbers differ in all bytes; the generators' own seeding mixes them.
    """
    return (base + _GAMMA * number) & _SEEDS


# `random.seed` for an int, without its type check.
_PYTHON: Final[Any] = random.seed.__self__  # type: ignore[attr-defined]
_seed_python: Final = super(random.Random, _PYTHON).seed
_seed_numpy: Final = np.random.seed
_seed_torch: Final = torch.default_generator.manual_seed


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's legacy (low 32 bits) and torch's default generator in about 6 us."""
    _seed_python(seed)
    _PYTHON.gauss_next = None
    _seed_numpy(seed & 0xFFFFFFFF)
    _seed_torch(seed)


_PLAIN: Final = frozenset({Tensor, list, tuple, range, TensorDataset})
_PLAIN_COLLATION: Final = (default_collate, default_convert, already_a_batch, collate_samples)


Indices = tuple[Any, int, int, int]
"""The index that a loader passes to a `SeededDataset`: sample indices (one, if samples are not
batched), the seed of the epoch, the number of samples before these over all ranks, the epoch."""


class DatasetWrapper:
    """Replaces the user's dataset, `dataset`, in our loaders."""

    dataset: Any


class SeededDataset(DatasetWrapper, Dataset[Any]):
    """A dataset that seeds the generators of each batch by epoch and position.

    If the dataset has a true attribute `seed_each_sample`, they are seeded before each sample
    instead (about 7 us each), so that samples do not depend on the batch size or on the number of
    ranks. With `__getitems__`, they are seeded once per batch in any case; a method
    `set_position(position)` is called before it with the number of samples of the epoch before this
    batch, over all ranks.

    Args:
        dataset: The user's dataset. If it has `set_epoch`, persistent workers call it too.
        observer: Records how loading changes the dataset; None = off.
    """

    def __init__(self, dataset: Any, observer: DatasetObserver | None = None) -> None:
        self.dataset = dataset
        self.epoch: int | None = None
        self.observer = observer
        self._seeds_each = getattr(dataset, "seed_each_sample", False) is True
        self._loads_batches = bool(getattr(dataset, "__getitems__", None))
        self._set_position = getattr(dataset, "set_position", None)

    def __getitem__(self, batch: Indices) -> Any:
        """Return one sample, or whatever the dataset returns for an index of its sampler."""
        item, seed, position, epoch = batch
        self._begin(epoch)
        seed_generators(spread(seed, position))
        return self.dataset[item]

    def __getitems__(self, batch: Indices) -> Any:
        """Return the samples of a batch."""
        items, seed, position, epoch = batch
        dataset, observer = self.dataset, self.observer
        if epoch != self.epoch or (observer is not None and observer.is_due):
            self._begin(epoch)
        seed_generators((seed + _GAMMA * position) & _SEEDS)
        if self._loads_batches:
            if self._set_position is not None:
                self._set_position(position)
            return dataset.__getitems__(items)
        if self._seeds_each:
            return [self[item, seed, number, epoch] for number, item in enumerate(items, position)]
        if observer is not None and observer.is_looking:
            return self._watched(items, observer)
        return [dataset[item] for item in items]

    def _watched(self, items: Any, observer: DatasetObserver) -> list[Any]:
        samples = []
        for number, item in enumerate(items):
            samples.append(self.dataset[item])
            if not number and len(items) > 1:
                observer.look()
        return samples

    def _begin(self, epoch: int) -> None:
        observer = self.observer
        if observer is not None and observer.is_due:
            observer.begin()
            observer.restore()
        if epoch != self.epoch:
            self.epoch = epoch
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)


def draws_nothing(dataset: Any) -> bool:
    """Return whether loading a sample of a map-style dataset is known to use no random numbers."""
    if isinstance(dataset, BatchDataset):
        return not dataset.draws_numbers
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(draws_nothing, dataset.datasets))
    return type(dataset) in _PLAIN


def collates_plainly(collate: Callable[..., Any] | None) -> bool:
    """Return whether a collate function is known to use no random numbers."""
    return any(collate is known for known in _PLAIN_COLLATION)
