"""Facts about a batch, whatever its nesting."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from modelzoo_trainer.errors import ConfigError


def batch_size_of(batch: Any) -> int:
    """Return the number of samples: the first dimension of the first tensor that has one.

    Args:
        batch: A tensor, or tensors in tuples, lists and mappings.

    Raises:
        ConfigError: If there is no such tensor.

    Cost:
        No host read; the shape is known without the values.
    """
    first = batch[0] if type(batch) in (tuple, list) and batch else batch
    if isinstance(first, Tensor) and first.dim():  # by far the most common batches
        return first.shape[0]
    for tensor in _tensors(batch):
        if tensor.dim():
            return tensor.shape[0]
    raise ConfigError(
        f"the size of a batch of type {type(batch).__name__} is not known: it has no tensor with "
        "a dimension. A batch is a tensor, or tensors in tuples, lists and mappings."
    )


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors(part)
    elif isinstance(batch, tuple | list):
        for part in batch:
            yield from _tensors(part)
