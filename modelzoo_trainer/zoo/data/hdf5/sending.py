"""Batches on their way from a worker of a DataLoader to the process that trains.

A tensor is sent through shared memory, with a file descriptor that the receiver asks for: some
0.5 ms each, more than it takes to read a batch of tokens. So rows are sent as one array, if it is
small through the pipe of the worker, and the receiver makes the features of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

Batch = MutableMapping[str, Any]

_MOST_IN_PIPE: Final = 2**19
"""Bytes up to which a pipe is faster than shared memory."""


class _BatchInWorker(MutableMapping[str, Any]):
    """A batch that a worker sends as one array, from which the receiver makes the features.

    Each tensor that is sent costs the receiver time, as does each feature here. If something in the
    worker has read or changed the batch, it is sent as it is. The receiver gets a `dict`.

    Args:
        rows: What is sent.
        restore: Makes the batch of the rows and the names.
        names: The features.
    """

    def __init__(
        self, rows: NDArray[Any], restore: Callable[..., Batch], names: Sequence[str]
    ) -> None:
        self._rows, self._restore, self._names = rows, restore, names
        self._made: Batch | None = None

    @property
    def _batch(self) -> Batch:
        if self._made is None:
            self._made = self._restore(self._rows, self._names)
        return self._made

    def __getitem__(self, key: str) -> Any:
        return self._batch[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._batch[key] = value

    def __delitem__(self, key: str) -> None:
        del self._batch[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._made is not None:
            return dict, (self._made,)
        is_small = self._rows.nbytes <= _MOST_IN_PIPE
        return self._restore, (
            self._rows if is_small else torch.from_numpy(self._rows),
            self._names,
        )


def by_feature(rows: NDArray[Any] | Tensor, names: Sequence[str]) -> Batch:
    """Return the features of rows (features, B, S)."""
    return dict(zip(names, torch.as_tensor(rows).unbind(), strict=True))


def of_windows(windows: NDArray[Any] | Tensor, names: Sequence[str]) -> Batch:
    """Return the features of whole windows (B, S + 1)."""
    tokens = torch.as_tensor(windows)
    inputs, labels = (
        part.to(torch.int32, copy=True, memory_format=torch.contiguous_format)
        for part in (tokens[:, :-1], tokens[:, 1:])
    )
    return dict(zip(names, (inputs, torch.ones_like(inputs), labels), strict=True))


def to_send(rows: NDArray[Any], restore: Callable[..., Batch], names: Sequence[str]) -> Batch:
    """Return the batch that `restore` makes; in a worker, one that is sent as one array."""
    if get_worker_info() is None:
        return restore(rows, names)
    return _BatchInWorker(rows, restore, names)
