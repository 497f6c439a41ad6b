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


def split_batch(batch: Any, size: int) -> list[Any]:
    """Return the batch in parts of at most `size` samples; views, nothing is copied.

    Tensors without dimensions, and what is no tensor, list of samples or container, go to every
    part as they are.

    `size`: samples of a part, > 0; the last part may have fewer.

    Raises:
        ConfigError: If the tensors do not have as many samples as one another.
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
                f"a batch of {num} samples has a tensor of shape {tuple(batch.shape)}, so it "
                f"cannot be split into micro-batches. Leave micro_batch_size out."
            )
        return batch[part]
    if isinstance(batch, Mapping):
        parts = {key: _slice(value, num, part) for key, value in batch.items()}
        return parts if type(batch) is dict else type(batch)(parts)  # type: ignore[call-arg]  # as a dict's
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
