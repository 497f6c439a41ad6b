"""Random numbers of a sample: from where in the data it is, whoever loads it."""

from __future__ import annotations

import random
from collections.abc import Callable
from operator import index
from typing import Any, Final, NamedTuple

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

from modelzoo_trainer.data.processor import BatchDataset, already_a_batch

_ALL: Final = (1 << 64) - 1
_SEEDS: Final = (1 << 62) - 1


def mixed(base: int, *numbers: int) -> int:
    """Return a seed of 62 bits that all of the numbers, of any size and sign, decide.

    Each is mixed in by the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable
    pseudorandom number generators, OOPSLA 2014), so that neighbours are far apart.
    """
    x = base
    for number in numbers:
        x = (x + 0x9E3779B97F4A7C15 * (number + 1)) & _ALL
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _ALL
        x ^= x >> 31
    return x & _SEEDS


def seed_generators(seed: int) -> None:
    """Seed python's, numpy's legacy (low 32 bits) and torch's default generator, in some 7 us."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


_PLAIN: Final = frozenset({Tensor, list, tuple, range, TensorDataset})
_PLAIN_COLLATION: Final = (default_collate, default_convert, already_a_batch)


class Indices(NamedTuple):
    """What a batch consists of, and what decides its random numbers.

    Args:
        items: What the sampler gave: a list of indices, or one if samples are not batched.
        seed: Of the epoch.
        epoch: The number of the epoch.
        position: Samples of the epoch before these; None = no sample comes twice in an epoch.
    """

    items: Any
    seed: int
    epoch: int
    position: int | None

    def seed_of(self, number: int, item: Any) -> int:
        """Return the seed of one sample; an index that is not an integer does not count."""
        try:
            seed = mixed(self.seed, index(item))
        except TypeError:
            seed = self.seed
        return seed if self.position is None else mixed(seed, self.position + number)

    def seed_of_all(self) -> int:
        """Return the seed of what is loaded at once: that of the first sample."""
        items = self.items
        is_batch = isinstance(items, (list, tuple)) and len(items) > 0
        return self.seed_of(0, items[0] if is_batch else items)


class SeededDataset(Dataset[Any]):
    """A data set whose samples draw from generators seeded by epoch and index.

    A data set with `__getitems__` is seeded once a batch, by its first index.

    Args:
        dataset: Of the user. If it has `set_epoch`, persistent workers get it too.
        each: Seed before each sample; if not, once a batch: the samples draw nothing, what puts
            them together may.
    """

    def __init__(self, dataset: Any, *, each: bool) -> None:
        self.dataset = dataset
        self.each = each
        self.epoch: int | None = None

    def __getitem__(self, batch: Indices) -> Any:
        """Return one sample, or whatever else the data set has for an index of its sampler."""
        self._tell_epoch(batch.epoch)
        seed_generators(batch.seed_of_all())
        return self.dataset[batch.items]

    def __getitems__(self, batch: Indices) -> Any:
        """Return the samples of a batch."""
        dataset, items = self.dataset, batch.items
        self._tell_epoch(batch.epoch)
        if self.each and not getattr(dataset, "__getitems__", None):
            return [self._sample(batch, number, item) for number, item in enumerate(items)]
        seed_generators(batch.seed_of_all())
        if getattr(dataset, "__getitems__", None):
            return dataset.__getitems__(items)
        return [dataset[item] for item in items]

    def _sample(self, batch: Indices, number: int, item: Any) -> Any:
        seed_generators(batch.seed_of(number, item))
        return self.dataset[item]

    def _tell_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)


def draws_nothing(dataset: Any) -> bool:
    """Return whether the samples of a map-style data set are known to need no random numbers."""
    if isinstance(dataset, BatchDataset):
        return not dataset.draws_numbers
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(draws_nothing, dataset.datasets))
    return type(dataset) in _PLAIN


def collates_plainly(collate: Callable[..., Any] | None) -> bool:
    """Return whether a collation is known to need no random numbers."""
    return any(collate is known for known in _PLAIN_COLLATION)
