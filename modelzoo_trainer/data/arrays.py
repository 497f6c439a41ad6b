"""Samples that are rows of tensors in memory."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modelzoo_trainer.data.dataloaders import BatchDataset


class TensorRows(BatchDataset):
    """Row i of every tensor is sample i.

    Args:
        tensors: All with the same first dimension; a batch is of the same kind (a tuple or a
            mapping with these keys).
    """

    def __init__(self, tensors: tuple[Tensor, ...] | Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        tensors = self.tensors
        first = tensors[0] if isinstance(tensors, tuple) else next(iter(tensors.values()))
        return first.shape[0]

    def __getitem__(self, index: int) -> Any:
        return self._rows(index)

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the batch of these samples."""
        return self._rows(indices)

    def _rows(self, which: int | list[int]) -> Any:
        if isinstance(self.tensors, tuple):
            return tuple(tensor[which] for tensor in self.tensors)
        return {key: tensor[which] for key, tensor in self.tensors.items()}
