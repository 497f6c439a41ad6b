"""Handwritten digits of scikit-learn: 1797 images of 8 x 8, without a download."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.base.constraints import Share, checked_dataclass
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.zoo.data.processor import (
    DataProcessor,
    LoadingArguments,
    TensorRows,
)
from modelzoo_trainer.zoo.data.sample_features import Feature, Features


@checked_dataclass(kw_only=True)
class DigitsProcessor(LoadingArguments, DataProcessor):
    """Load batches `(inputs, labels)` of the handwritten digits of scikit-learn.

    Args:
        split: `train` or `val`, which are disjoint.
        val_fraction: Fraction of the images in `val`, between 0 and 1.
        split_seed: Seed of the split.

    Shapes:
        inputs: (B, 8, 8), float32, 0 to 1. labels: (B,), int64, 0 to 9.

    Raises:
        ConfigError: If a number is out of range, neither or both batch sizes are given, or
            scikit-learn is missing.
    """

    split: Literal["train", "val"] = "train"
    val_fraction: Share = 0.2
    split_seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        self.options = self.loading_options(reshuffle=self.split == "train")
        self.dataset = self.process(*self.split_data(*self.load()))

    @event("load")
    def load(self) -> tuple[Tensor, Tensor]:
        """Return all images and labels."""
        return _load_digits()

    @event("split")
    def split_data(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images and labels of the split."""
        generator = torch.Generator().manual_seed(self.split_seed)
        order = torch.randperm(len(images), generator=generator)
        num_val = max(1, round(self.val_fraction * len(images)))
        chosen = order[:num_val] if self.split == "val" else order[num_val:]
        return images[chosen], labels[chosen]

    @event("process")
    def process(self, images: Tensor, labels: Tensor) -> BatchDataset:
        """Return the dataset of these images."""
        return TensorRows((images, labels))

    @override
    def sample_features(self, model: Any) -> Features:
        return Feature((8, 8), torch.float32), Feature((), torch.int64)

    @override
    def missing(self) -> list[str]:
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
