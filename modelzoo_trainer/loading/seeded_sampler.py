"""A sampler whose order is given by seed and epoch."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

_CHUNK: Final = 8192  # indices converted to Python objects at a time


class SeededSampler(Sampler[int]):
    """Yield every index once per epoch, in an order given by seed and epoch.

    `reshuffle`: whether each epoch has its own order; else all have the first epoch's.

    The epoch is set by `set_epoch`; each new iterator increments it.
    """

    def __init__(self, length: int, *, seed: int, reshuffle: bool = True) -> None:
        self.length = length
        self.seed = seed
        self.reshuffle = reshuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._indices(epoch)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return all indices of an epoch.

        Cost:
            Eight bytes and about ten nanoseconds per index.
        """
        generator = torch.Generator().manual_seed(
            mixed_seed(self.seed, epoch if self.reshuffle else 0)
        )
        order: NDArray[np.int64] = torch.randperm(self.length, generator=generator).numpy()
        return order

    def _indices(self, epoch: int) -> Iterator[int]:
        order = self.order(epoch)
        for start in range(0, self.length, _CHUNK):
            yield from order[start : start + _CHUNK].tolist()


def mixed_seed(seed: int, *numbers: int) -> int:
    """Mix a seed with numbers, such as the epoch: (1, 0) and (0, 1) give unrelated seeds."""
    for number in numbers:
        mixed = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9) % 2**64
        seed = (mixed ^ (mixed >> 31)) % 2**63
    return seed
