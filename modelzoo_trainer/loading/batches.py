"""Size and splitting of batches of any structure."""

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
        No host read: the shape is known without the values.
    """
    first = batch[0] if type(batch) in (tuple, list) and batch else batch
    if isinstance(first, Tensor) and first.dim():  # the most common case
        return first.shape[0]
    for tensor in _tensors(batch):
        if tensor.dim():
            return tensor.shape[0]
    raise ConfigError(
        f"Cannot find the size of a batch of type {type(batch).__name__}: it has no tensor with a "
        f"dimension. A batch must be a tensor, or tensors in tuples, lists and dicts."
    )


def split_batch(batch: Any, size: int) -> list[Any]:
    """Split a batch into micro-batches of at most `size` samples, as views without a copy.

    Tensors without dimensions, and objects that are not a tensor, list of samples or container, are
    in every micro-batch.

    `size`: samples per micro-batch, > 0; the last one may have fewer.

    Raises:
        ConfigError: If the tensors have different numbers of samples.
    """
    num = batch_size_of(batch)
    if num <= size:
        return [batch]
    return [_slice(batch, num, slice(start, start + size)) for start in range(0, num, size)]


def _slice(batch: Any, num: int, part: slice) -> Any:
    if isinstance(batch, Tensor):
        if not batch.dim():
            return batch
        if batch.shape[0] != num:
            raise ConfigError(
                f"A batch of {num} samples has a tensor of shape {tuple(batch.shape)}, so it "
                f"cannot be split into micro-batches. Make the samples the first dimension of "
                f"every tensor, or remove csx.performance.micro_batch_size."
            )
        return batch[part]
    if isinstance(batch, Mapping):
        parts = {key: _slice(value, num, part) for key, value in batch.items()}
        return parts if type(batch) is dict else type(batch)(parts)  # type: ignore[call-arg]  # like dict
    if isinstance(batch, tuple | list):
        if len(batch) == num and next(_tensors(batch), None) is None:
            return batch[part]  # a list of samples
        items = [_slice(item, num, part) for item in batch]
        named = hasattr(batch, "_fields")
        return type(batch)(*items) if named else type(batch)(items)
    return batch


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors(part)
    elif isinstance(batch, tuple | list):
        for part in batch:
            yield from _tensors(part)
