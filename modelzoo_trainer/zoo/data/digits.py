"""Handwritten digits of scikit-learn: 1797 images of 8 x 8, without a download."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelzoo_trainer.base.constraints import NonNegativeSize, PositiveInt, Share, Size, checked
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.zoo.data.processor import (
    DataProcessor,
    LoadingOptions,
    ShuffleSeed,
    TensorRows,
)


class DigitsProcessor(DataProcessor):
    """Load batches `(inputs, labels)` of the handwritten digits of scikit-learn.

    Args:
        batch_size: Samples per batch and process, >= 1.
        global_batch_size: Samples per batch over all processes, a multiple of their number; give
            either this or `batch_size`.
        split: `train` or `val`, which are disjoint.
        val_fraction: Fraction of the images in `val`, between 0 and 1.
        split_seed: Seed of the split.
        shuffle: Whether to shuffle.
        shuffle_seed: Seed of the order.
        num_workers: Number of worker processes; 0 = load in the main process.
        drop_last: Whether to drop a smaller last batch.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.

    Shapes:
        inputs: (B, 8, 8), float32, 0 to 1. labels: (B,), int64, 0 to 9.

    Raises:
        ConfigError: If a number is out of range, neither or both batch sizes are given, or
            scikit-learn is missing.
    """

    @checked()
    def __init__(
        self,
        *,
        batch_size: PositiveInt | None = None,
        global_batch_size: PositiveInt | None = None,
        split: Literal["train", "val"] = "train",
        val_fraction: Share = 0.2,
        split_seed: int = 0,
        shuffle: bool = True,
        shuffle_seed: ShuffleSeed = 0,
        num_workers: NonNegativeSize = 0,
        drop_last: bool = False,
        prefetch_factor: Size | None = None,
        persistent_workers: bool = False,
    ) -> None:
        self.options = LoadingOptions(
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            shuffle_seed=shuffle_seed,
            reshuffle=split == "train",
            num_workers=num_workers,
            drop_last=drop_last,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        self._split = split, val_fraction, split_seed
        self.dataset = self.process(*self.split_data(*self.load()))

    @event("load")
    def load(self) -> tuple[Tensor, Tensor]:
        """Return all images and labels."""
        return _load_digits()

    @event("split")
    def split_data(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images and labels of the split."""
        split, val_fraction, split_seed = self._split
        generator = torch.Generator().manual_seed(split_seed)
        order = torch.randperm(len(images), generator=generator)
        num_val = max(1, round(val_fraction * len(images)))
        chosen = order[:num_val] if split == "val" else order[num_val:]
        return images[chosen], labels[chosen]

    @event("process")
    def process(self, images: Tensor, labels: Tensor) -> BatchDataset:
        """Return the dataset of these images."""
        return TensorRows((images, labels))

    @classmethod
    def check_arguments(cls, **arguments: Any) -> list[str]:
        """Check the arguments without loading; return what is missing on this machine.

        Raises:
            ConfigError: If neither or both batch sizes are given.
        """
        LoadingOptions.check(arguments)
        return [] if find_spec("sklearn") is not None else [_NEEDS]


_NEEDS: Final = (
    "DigitsProcessor requires scikit-learn, which is not installed: pip install scikit-learn"
)


def _load_digits() -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(_read_rows())
    images = rows[:, :-1].reshape(-1, 8, 8).float() / 16  # pixels are 0 to 16
    return images, rows[:, -1].long()


def _read_rows() -> NDArray[np.float64]:
    """Return a row of 64 pixels and the label for each image."""
    found = find_spec("sklearn")
    if found is None:
        raise ConfigError(_NEEDS)
    # Only the file: to import scikit-learn takes a quarter of the time that a short run does.
    path = Path(found.origin or "").parent / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        return np.loadtxt(path, delimiter=",")
    digits = import_module("sklearn.datasets").load_digits()
    return np.column_stack((digits.data, digits.target))
