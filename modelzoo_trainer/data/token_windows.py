"""Sequences of tokens: window i of a long row of them, with the token after each as label."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from modelzoo_trainer.data.dataloaders import BatchDataset


class TokenWindows(BatchDataset):
    """Windows that follow each other without overlap; the rest at the end is left out.

    Args:
        path: A `.npy` file of tokens; mapped into memory by each process for itself.
        length: Tokens in a window.

    Shapes:
        A batch: input_ids and labels (B, length), int32.
    """

    def __init__(self, path: Path, length: int) -> None:
        self.path = path
        self.length = length
        self._tokens: npt.NDArray[Any] = np.load(path, mmap_mode="r")
        self._steps = np.arange(length + 1)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the file."""
        return len(self._tokens)

    def __len__(self) -> int:
        return max(0, (self.num_tokens - 1) // self.length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one window, without a batch dimension."""
        return {key: rows[0] for key, rows in self.__getitems__([index]).items()}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """Return the batch of these windows."""
        starts = np.asarray(indices, dtype=np.int64) * self.length
        windows = self._tokens[starts[:, None] + self._steps]  # copies: the file stays untouched
        return {
            "input_ids": torch.from_numpy(windows[:, :-1].astype(np.int32)),
            "labels": torch.from_numpy(windows[:, 1:].astype(np.int32)),
        }

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "length": self.length}  # a mapped array would travel as a copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # opens the file again
