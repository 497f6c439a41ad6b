"""The order of samples: a function of a seed and the number of the pass."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

_CHUNK: Final = 8192  # indices that are Python objects at a time


class SeededSampler(Sampler[int]):
    """Every index once a pass, in an order that seed and pass determine.

    Args:
        length: Number of samples.
        seed: Of the order.
        reshuffle: Whether every pass has its own order. If not, all are as the first.

    The number of the pass is what `set_epoch` says; each pass that begins counts one on.
    """

    def __init__(self, length: int, *, seed: int, reshuffle: bool = True) -> None:
        self.length = length
        self.seed = seed
        self.reshuffle = reshuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which pass begins next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._indices(epoch)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return all indices of a pass.

        Args:
            epoch: The number of the pass.

        Cost:
            Eight bytes and about ten nanoseconds an index.
        """
        generator = torch.Generator().manual_seed(_mix(self.seed, epoch if self.reshuffle else 0))
        order: NDArray[np.int64] = torch.randperm(self.length, generator=generator).numpy()
        return order

    def _indices(self, epoch: int) -> Iterator[int]:
        order = self.order(epoch)
        for start in range(0, self.length, _CHUNK):
            yield from order[start : start + _CHUNK].tolist()


def _mix(seed: int, epoch: int) -> int:
    """Return a seed such that (1, 0) and (0, 1) have nothing in common."""
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9) % 2**64
    return (mixed ^ (mixed >> 31)) % 2**63
