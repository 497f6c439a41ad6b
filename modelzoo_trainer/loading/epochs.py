"""One epoch of a dataloader, with the last batch marked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader, Dataset, IterableDataset

from modelzoo_trainer.callback import Batch, Loader
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.sharding import ShardedBatch
from modelzoo_trainer.loading.workers import shut_down, start_iterator

if TYPE_CHECKING:
    from modelzoo_trainer.base.devices import Backend


def resolve_loader(loader: Loader, name: str) -> Iterable[Batch]:
    """Return a dataloader argument as an iterable; call it if it is a callable.

    Raises:
        ConfigError: If it is neither, is a module, or yields samples.
    """
    _refuse_module(loader, name)
    made = loader
    if isinstance(loader, type) or (callable(loader) and not hasattr(loader, "__iter__")):
        made = loader()
    _require_batches(made, name)
    return made  # type: ignore[no-any-return]  # checked above


def pin_in_thread(loader: Iterable[Batch], backend: Backend) -> None:
    """Have a DataLoader with workers pin its batches, if they are copied from pinned memory.

    It does so in a thread, while the trainer would in the main one.
    """
    if backend.caps.pins and isinstance(loader, DataLoader) and loader.num_workers:
        loader.pin_memory = True


def _refuse_module(loader: Any, name: str) -> None:
    if isinstance(loader, Module):
        raise ConfigError(
            f"{name} got the module {type(loader).__name__}. fit, validate, test and predict take "
            f"dataloaders; the model goes to Trainer(model=...)."
        )


def _require_batches(made: Any, name: str) -> None:
    if _holds_samples(made):
        raise ConfigError(
            f"{name} got the dataset {type(made).__name__}, but requires batches. Wrap it: "
            f"torch.utils.data.DataLoader(dataset, batch_size=...), with batch_size=None if its "
            f"items are batches already."
        )
    if isinstance(made, (Mapping, str)):
        raise ConfigError(
            f"{name} got a {type(made).__name__}, which is not a sequence of batches. Pass a "
            f"DataLoader or a list of batches."
        )
    if callable(getattr(made, "train_dataloader", None)) and not hasattr(made, "__iter__"):
        raise ConfigError(
            f"{name} got {type(made).__name__}, a data module, but requires a dataloader. Call its "
            f"setup, then pass data.train_dataloader() and data.val_dataloader() to fit, or "
            f"data.test_dataloader() to test."
        )
    if not hasattr(made, "__iter__") and not hasattr(made, "__getitem__"):
        raise ConfigError(
            f"{name} got {made!r}, which is not iterable. Pass a DataLoader, another iterable "
            f"of batches, or a callable that returns one."
        )


def _holds_samples(made: Any) -> bool:
    """Return whether it is a map-style dataset, torch's own or duck-typed."""
    if isinstance(made, IterableDataset):
        return False  # it may yield whole batches
    return isinstance(made, Dataset) or hasattr(made, "__getitems__")


def as_loaders(loaders: Loader | None, name: str) -> list[Loader]:
    """Return the dataloaders of an argument that takes one or several.

    A list or tuple is several dataloaders if one of its elements cannot be a batch: a DataLoader,
    a callable, or another iterable that is not a tensor, tuple, list or mapping. Otherwise it is
    one dataloader, a list of batches.

    Raises:
        ConfigError: If one yields samples, or if the argument is ambiguous: a list of lists of
        tuples, lists or mappings.
    """
    if loaders is None:
        return []
    found = [loaders]
    if isinstance(loaders, (list, tuple)):
        if any(map(_is_loader, loaders)):
            found = list(loaders)
        elif any(map(_may_be_loader, loaders)):
            raise ConfigError(
                f"{name} is ambiguous: the items of this {type(loaders).__name__} are lists of "
                f"tuples, lists or dicts, so each item may be a batch or a dataloader. If they are "
                f"the batches of one dataloader, pass lambda: batches; if they are several "
                f"dataloaders, pass [lambda: first, lambda: second]."
            )
    for loader in found:
        _refuse_module(loader, name)
        if not callable(loader):  # its result is checked when it is called
            _require_batches(loader, name)
    return found


def one_loader(loader: Loader, name: str) -> Iterable[Batch]:
    """Return the iterable of an argument that takes one dataloader alone.

    Raises:
        ConfigError: If there are several, or it cannot be used.
    """
    if isinstance(loader, (list, tuple)):
        found = as_loaders(loader, name)
        if found and found[0] is not loader:
            raise ConfigError(
                f"{name} got a {type(loader).__name__} of {len(found)} dataloaders, but takes "
                f"only one. Call the method once for each dataloader."
            )
    return resolve_loader(loader, name)


def _is_loader(item: Any) -> bool:
    if isinstance(item, (Tensor, tuple, list, Mapping, str)):
        return False
    return callable(item) or hasattr(item, "__iter__") or _holds_samples(item)


def _may_be_loader(item: Any) -> bool:
    """Return whether an item of a list of loaders may itself be a list of batches."""
    is_list = isinstance(item, list)
    return is_list and all(isinstance(part, (tuple, list, Mapping)) for part in item)


def exact_length(loader: Iterable[Batch]) -> int | None:
    """Return the number of batches if it is known to be exact, else None."""
    if isinstance(loader, DataLoader):
        return None if isinstance(loader.dataset, IterableDataset) else known_length(loader)
    return len(loader) if isinstance(loader, (list, tuple)) else None


def known_length(items: Any) -> int | None:
    """Return the length of a loader or dataset, if it has one."""
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEpoch:
    """An epoch that has been started, at its first batch or later.

    Args:
        items: Numbers and batches.
        length: Number of batches of the whole epoch if exact; None = not known.
        position: Batches skipped at its start.
        parts: Micro-batches of the first batch that are also skipped.
        skipped: Numbers of other skipped batches.
        is_sharded: Whether the batches are `ShardedBatch`es: there are several ranks.
        marked: (batch, is it the last, number), in place of `items` and `length`; None = the
            loader does not know the last one.
        close: Frees the resources of the epoch.
    """

    items: Iterator[tuple[int, Batch]]
    length: int | None = None
    position: int = 0
    parts: int = 0
    skipped: Collection[int] = ()
    is_sharded: bool = False
    marked: Iterator[tuple[Batch, bool, int]] | None = None
    close: Callable[[], None] | None = None


class EpochIterator:
    """The batches of one epoch; `items` yields (batch, is it the last, number).

    If the loader's length is exact, batches are fetched one by one; otherwise one batch is
    prefetched to find the last one.

    With several ranks, `is_padding` is true for a padding batch: other ranks have samples left,
    this one has none. `is_even` is true if all ranks have the same number of samples in the batch;
    it is equal on all ranks, without communication.

    Args:
        loader: The dataloader, or a started epoch of it.
        place: Moves batches to the device: `backend.batches`.
        limit: Number of batches after which the epoch ends; None = no limit.
        micro_batch_size: Yield micro-batches of at most this many samples. `ends_batch`: whether
            the current one is the last of its batch. `num_parts`: how many the batch has.
        inspect: Called with the first batch before it is moved; it may raise.
    """

    def __init__(
        self,
        loader: Iterable[Batch] | StartedEpoch,
        place: Callable[[Iterable[Any]], Iterator[Any]],
        *,
        limit: int | None = None,
        micro_batch_size: int | None = None,
        inspect: Callable[[Batch], None] | None = None,
    ) -> None:
        self._started: Iterator[Batch] | None = None
        self.is_padding = False
        self.is_even = True
        if isinstance(loader, StartedEpoch):
            begun = loader
        else:
            iterator = start_iterator(loader)
            begun = StartedEpoch(items=_numbered(iterator, loader), length=exact_length(loader))
            if iterator is not loader and not getattr(loader, "persistent_workers", False):
                self._started = iterator
        self._close = begun.close
        items = _marked(begun, limit)
        if inspect is not None:
            items = _inspected(items, inspect)
        self.items: Iterator[tuple[Batch, bool, int]] = place(items)
        self.ends_batch = True
        self.num_parts = 1
        if micro_batch_size is not None:
            self.items = self._split(self.items, begun, micro_batch_size)
        elif begun.is_sharded:
            self.items = self._own_parts(self.items)
        self.is_last = False
        self.num_yielded = begun.position

    def __next__(self) -> Batch:
        batch, self.is_last, _ = next(self.items)
        self.num_yielded += 1
        return batch

    def close(self) -> None:
        """Shut down workers started for this epoch. Idempotent."""
        iterator, self._started = self._started, None
        shut_down(iterator)
        if self._close is not None:
            self._close()

    def _own_parts(
        self, items: Iterator[tuple[ShardedBatch, bool, int]]
    ) -> Iterator[tuple[Batch, bool, int]]:
        """Yield this rank's part of sharded batches."""
        sizes: tuple[int, ...] | None = None
        for (batch, info), is_last, idx in items:
            self.is_padding = info.is_padding
            if info.sizes is not sizes:  # full batches mostly share one object
                sizes, self.is_even = info.sizes, info.is_even
            yield batch, is_last, idx

    def _split(
        self, items: Iterator[tuple[Any, bool, int]], begun: StartedEpoch, size: int
    ) -> Iterator[tuple[Batch, bool, int]]:
        """Split batches, or this rank's part of them, into micro-batches."""
        num_skipped = begun.parts
        for given, is_last, idx in items:
            batch: ShardedBatch = given if begun.is_sharded else ShardedBatch.whole(given)
            parts = batch.micro_batches(size)
            self.num_parts = len(parts)
            for number, (part, info) in enumerate(parts[num_skipped:], num_skipped + 1):
                self.is_padding, self.is_even = info.is_padding, info.is_even
                self.ends_batch = number == self.num_parts
                yield part, is_last and self.ends_batch, idx
            num_skipped = 0


def _numbered(iterator: Iterator[Batch], loader: Any) -> Iterator[tuple[int, Batch]]:
    for number in count():
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            error.add_note(f"raised while a {type(loader).__name__} loaded batch {number}")
            raise
        yield number, batch


def _inspected(
    items: Iterator[tuple[Any, bool, int]], inspect: Callable[[Batch], None]
) -> Iterator[tuple[Any, bool, int]]:
    """Yield batches; call a function with the first one, or this rank's part of it."""
    first = next(items, None)
    if first is None:
        return
    batch = first[0]
    inspect(batch.batch if isinstance(batch, ShardedBatch) else batch)
    yield first
    yield from items


def _marked(begun: StartedEpoch, limit: int | None) -> Iterator[tuple[Batch, bool, int]]:
    if begun.marked is not None:
        return begun.marked
    ends = [end for end in (begun.length, limit) if end is not None]
    if not ends:
        return _one_ahead(begun.items)
    last = last_index(begun.position, min(ends), begun.skipped)
    if last is None:
        return iter(())
    if begun.length is None:
        return _one_ahead(_through(begun.items, last))
    return _counted(begun, last)


def last_index(start: int, end: int, skipped: Collection[int]) -> int | None:
    """Return the last number in [start, end) that is not skipped, or None."""
    numbers = range(end - 1, start - 1, -1)
    return next((number for number in numbers if number not in skipped), None)


def _counted(begun: StartedEpoch, last: int) -> Iterator[tuple[Batch, bool, int]]:
    idx = begun.position - 1
    for idx, batch in begun.items:
        yield batch, idx == last, idx
        if idx == last:
            return
    raise RuntimeError(
        f"the dataloader's length is {begun.length} batches, but it ended after {idx + 1}. Correct "
        f"its __len__."
    )


def _through(items: Iterator[tuple[int, Batch]], last: int) -> Iterator[tuple[int, Batch]]:
    for idx, batch in items:
        yield idx, batch
        if idx == last:
            return


def _one_ahead(items: Iterator[tuple[int, Batch]]) -> Iterator[tuple[Batch, bool, int]]:
    current = next(items, None)
    while current is not None:
        following = next(items, None)
        idx, batch = current
        yield batch, following is None, idx
        current = following
