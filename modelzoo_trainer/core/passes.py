"""One pass over a dataloader: batches that know whether they are the last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from modelzoo_trainer.callback import Batch, Loader
from modelzoo_trainer.data.batches import split_batch
from modelzoo_trainer.errors import ConfigError

_NONE = object()


def resolve_loader(loader: Loader, name: str) -> Iterable[Batch]:
    """Return the iterable that a dataloader argument stands for.

    Args:
        loader: An iterable of batches, or a callable without arguments that returns one.
        name: The argument's name, for the message.

    Raises:
        ConfigError: If it is neither.
    """
    made = loader
    if isinstance(loader, type) or (callable(loader) and not hasattr(loader, "__iter__")):
        made = loader()
    if not hasattr(made, "__iter__") and not hasattr(made, "__getitem__"):
        raise ConfigError(
            f"{name} got {made!r}, which cannot be iterated. Pass a DataLoader, another iterable "
            f"of batches, or a callable that returns one."
        )
    return made  # type: ignore[no-any-return]  # checked above


def as_loaders(loaders: Loader | None) -> list[Loader]:
    """Return the dataloaders of an argument that takes one or several.

    A list is several dataloaders if all its elements are: DataLoaders, callables, or iterables
    that are not themselves batches (tensors, tuples, lists, mappings). Otherwise it is one
    dataloader, a list of batches.
    """
    if loaders is None:
        return []
    if isinstance(loaders, (list, tuple)) and loaders and all(map(_is_loader, loaders)):
        return list(loaders)
    return [loaders]


def _is_loader(item: Any) -> bool:
    if isinstance(item, (Tensor, tuple, list, dict, str)):
        return False
    return callable(item) or hasattr(item, "__iter__")


def exact_length(loader: Iterable[Batch]) -> int | None:
    """Return the number of batches where it cannot be wrong, else None."""
    if isinstance(loader, DataLoader):
        return None if isinstance(loader.dataset, IterableDataset) else len(loader)
    return len(loader) if isinstance(loader, (list, tuple)) else None


def known_length(loader: Iterable[Batch]) -> int | None:
    """Return the number of batches as the loader tells it, or None."""
    try:
        return len(loader)  # type: ignore[arg-type]  # asked, not assumed
    except TypeError:
        return None


class Pass:
    """One pass over the batches of a dataloader; `items` yields (batch, is it the last).

    A loader whose length is exact is read batch by batch; of any other one the next batch is
    fetched early, to know the last one when it is yielded.

    Args:
        loader: The dataloader.
        place: Puts batches on the device: `backend.batches`.
        limit: Most batches to yield; None = all.
        skip: Batches to leave out at the start (they were trained on before).
        micro_batch_size: Yield batches in parts of at most this many samples; `ends_batch` says
            whether the part at hand is the last of its batch, `num_parts` how many that has.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        place: Callable[[Iterable[Batch]], Iterator[Batch]],
        *,
        limit: int | None = None,
        skip: int = 0,
        micro_batch_size: int | None = None,
    ) -> None:
        num = exact_length(loader)
        if limit is not None and num is not None:
            num = min(num, limit)
        fetched = islice(iter(loader), skip, limit)
        marked = _one_ahead(fetched) if num is None else _counted(fetched, num - skip)
        self.items = place(marked)
        self.ends_batch = True
        self.num_parts = 1
        if micro_batch_size is not None:
            self.items = self._in_parts(self.items, micro_batch_size)
        self.is_last = False
        self.num_yielded = skip

    def __next__(self) -> Batch:
        batch, self.is_last = next(self.items)
        self.num_yielded += 1
        return batch

    def _in_parts(
        self, items: Iterator[tuple[Batch, bool]], size: int
    ) -> Iterator[tuple[Batch, bool]]:
        for batch, is_last in items:
            parts = split_batch(batch, size)
            self.num_parts = len(parts)
            for number, part in enumerate(parts, 1):
                self.ends_batch = number == self.num_parts
                yield part, is_last and self.ends_batch


def _counted(batches: Iterator[Batch], num: int) -> Iterator[tuple[Batch, bool]]:
    idx = 0
    for idx, batch in enumerate(batches, 1):
        yield batch, idx == num
        if idx == num:
            return
    if idx < num:
        raise RuntimeError(f"the dataloader's length is {num} batches, but it ended after {idx}.")


def _one_ahead(batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    current = next(batches, _NONE)
    while current is not _NONE:
        following = next(batches, _NONE)
        yield current, following is _NONE
        current = following
