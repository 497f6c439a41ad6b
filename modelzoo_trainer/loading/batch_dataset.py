"""Datasets that return whole batches, and the collation of samples."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch.utils.data import Dataset, default_collate


class BatchDataset(Dataset[Any], ABC):
    """A dataset that returns whole batches: `__getitems__` receives all indices at once.

    If its samples need random numbers, set `draws_numbers`: its batches are then loaded with
    generators seeded by the epoch and the first index.
    """

    draws_numbers: ClassVar[bool] = False

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """Return one sample."""

    @abstractmethod
    def __getitems__(self, indices: list[int]) -> Any:
        """Return the batch of these samples."""


def already_a_batch(batch: Any) -> Any:
    """Return the batch unchanged: the dataset has collated it."""
    return batch


def collate_samples(samples: Any) -> Any:
    """Collate a list of samples; return anything else unchanged, as a batch."""
    return default_collate(samples) if isinstance(samples, list) else samples
