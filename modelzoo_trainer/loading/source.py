"""The batches of an epoch: from any iterable, from lists, and from loaders with state."""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from typing_extensions import override

from modelzoo_trainer.callback import Batch
from modelzoo_trainer.loading.batch_seeds import draws_nothing, mixed, seed_generators
from modelzoo_trainer.loading.hidden_state import OF_DATA, OF_SAMPLERS, HiddenState
from modelzoo_trainer.loading.position import EpochStart, LoaderState, set_epoch_of
from modelzoo_trainer.loading.sharding import ShardedBatch, ShardInfo, Split, size_of
from modelzoo_trainer.loading.workers import shut_down, start_iterator

log = logging.getLogger("modelzoo_trainer.data")
_log_of_positions = logging.getLogger("modelzoo_trainer.data.positioned")

NumberedBatches = Iterator[tuple[int, Any]]  # number, Batch (ShardedBatch with several ranks)
MarkedBatches = Iterator[tuple[Any, bool, int]]  # batch, is it the last, number
Exchange = Callable[[int], list[int]]

_MOST_SHOWN: Final = 64  # indices in a message
_NUM_COMPARED: Final = 16  # values of a tensor in a checksum
_OF_NUMPY: Final = frozenset(
    [
        *(torch.float32, torch.float64, torch.float16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    ]
)


class Source:
    """The batches of any iterable; on resume, batches already trained on are reloaded and dropped.

    State that the iterable keeps in its attributes between epochs (generators, counters) is saved
    as of the start of the epoch, and restored on resume.

    `seeds_host`: whether the generators of this process are seeded while batches are fetched.
    `seeds_ahead`: whether that happens before earlier batches are trained on. `draws`: whether
    loading may use generators of the loading process. `reads_to_end`: whether only the loader ends
    an epoch, whatever its length. `keeps_state`: whether `state` returns anything.

    Args:
        loader: The iterable.
        name: The argument's name, for messages.
    """

    seeds_host = True
    seeds_ahead = True
    draws = False
    reads_to_end = False
    keeps_state = True

    def __init__(self, loader: Iterable[Batch], name: str = "train_dataloader") -> None:
        self.loader = loader
        self.name = name
        self.latest: tuple[Batch] | None = None
        """The batch fetched last in the epoch, including dropped ones; None = none."""
        self._iterator: Iterator[Any] | None = None
        self._checksums = Checksums()
        self._hidden: HiddenState | None = None
        self._attributes: LoaderState = {}
        self._missing: dict[str, Any] = {}
        """Attributes of a checkpoint that do not exist yet."""
        self._is_begun = False
        self._has_looked = False

    def begin(self, start: EpochStart) -> NumberedBatches:
        """Return an iterator over the numbers and batches of an epoch."""
        self.close()
        self.warn_of_loading(start.num_before + start.batch_idx)
        saved = (start.loader_state or {}) if start.restores else {}
        if not self._is_begun:
            self._is_begun = True
            self._hidden = hidden_state_of(self.loader)
            self.warn_of_iterators()
            self._warn_of_persistent_workers()
        self.begin_attributes(saved, start.epoch)
        self._checksums.begin(saved)
        seed_generators(start.seeds.order)
        self._iterator = start_iterator(self.loader)
        for _ in islice(self._iterator, start.num_before):
            pass
        return self._fetched(self._iterator, start, 0)

    def begin_marked(self, start: EpochStart) -> MarkedBatches | None:
        """Like `begin`, with the last batch marked; None = not known in advance."""
        return None

    def warn_of_loading(self, num: int) -> None:
        """Warn that batches are loaded and dropped, if any are."""
        if num:
            log.warning(
                "%s (%s) cannot start in the middle of an epoch, so the first %d batches are "
                "loaded and dropped. To resume without this delay, pass a torch DataLoader over a "
                "map-style dataset, or implement state_dict() and load_state_dict() in the loader.",
                self.name,
                type(self.loader).__name__,
                num,
            )

    def begin_attributes(self, saved: LoaderState, epoch: int) -> None:
        """Restore the attributes as of the start of the epoch, and save them again."""
        hidden = self._hidden
        if hidden is None:
            return
        if "attributes" in saved:
            self._has_looked = False
            left = hidden.load(saved["attributes"])
            self._missing = {path: saved["attributes"][path] for path in left}
            set_epoch_of(self.loader, epoch)  # restoring may have reset it
        if names := saved.get("unsaved"):
            self._warn_of_attributes("The", "had", names)
        self._attributes = hidden_states(hidden)
        if names := hidden.newly_unsaved():
            self._warn_of_attributes("A", "changes", names)

    def look(self) -> None:
        """Look at the attributes after the first batch: at what is lost on resume, or was lost."""
        self._has_looked = True
        hidden = self._hidden
        if hidden is None:
            return
        if self._missing and (names := hidden.differing(self._missing)):
            self._warn_of_attributes("The", "had", names)
        self._missing = {}
        if names := hidden.newly_lost():
            self._warn_of_attributes("From the second epoch on, a", "changes", names)

    def _warn_of_attributes(self, which: str, does: str, names: list[str]) -> None:
        log.warning(
            "%s resumed run may differ: %s (%s) %s attributes that cannot be saved in checkpoints "
            "(%s), and batches may depend on them. Implement state_dict() and load_state_dict() in "
            "the loader.",
            which,
            self.name,
            type(self.loader).__name__,
            does,
            ", ".join(names),
        )

    def warn_of_iterators(self) -> None:
        """Warn about iterators kept between epochs."""
        loader = self.loader
        found = [] if self._hidden is None else self._hidden.iterators()
        if found:
            log.warning(
                "A resumed run may differ: %s (%s) keeps an iterator (%s), whose position cannot "
                "be saved. Create the iterator in __iter__, or implement state_dict() and "
                "load_state_dict().",
                self.name,
                type(loader).__name__,
                ", ".join(found),
            )

    def _warn_of_persistent_workers(self) -> None:
        loader = self.loader
        if getattr(loader, "persistent_workers", False) and not draws_nothing(
            getattr(loader, "dataset", None)
        ):
            log.warning(
                "A resumed run may differ: %s (%s) uses persistent workers, which are seeded only "
                "in the first epoch. Set persistent_workers=False or use "
                "torch.utils.data.DataLoader.",
                self.name,
                type(loader).__name__,
            )

    def _fetched(self, iterator: Iterator[Batch], start: EpochStart, first: int) -> NumberedBatches:
        self.latest = None
        for number in count(first):
            seed_generators(mixed(start.seeds.fetches, number))
            try:
                batch = next(iterator)
            except StopIteration:
                self.note(None)
                return
            except Exception as error:
                error.add_note(place_of(self.name, start.epoch, number))
                raise
            self.latest = (batch,)
            if not self._has_looked:
                self.look()
            if start.needs_state:
                self._keep_state(number + 1, batch)
            if number < start.batch_idx:
                continue
            if number in start.skipped:
                log_skipped(start.epoch, number)
                continue
            yield number, batch

    def _keep_state(self, num: int, batch: Batch) -> None:
        self.note(num)
        if self._checksums.add(num, batch):
            self.warn_of_other_batches()

    def warn_of_other_batches(self) -> None:
        """Warn that reloaded batches differ from those before the checkpoint."""
        log.warning(
            "The resumed run may differ: %s (%s) does not yield the same batches as before the "
            "checkpoint; some samples will be trained on again and others skipped. Shuffle only "
            "with random, numpy.random or torch (the trainer seeds them for each epoch) or with "
            "set_epoch(epoch); or implement state_dict() and load_state_dict().",
            self.name,
            type(self.loader).__name__,
        )

    def note(self, position: int | None) -> None:
        """Record that `position` batches have been fetched; None = all."""

    def state(self, position: int | None) -> LoaderState | None:
        """Return the checkpoint state after `position` batches; None = after a whole epoch."""
        found: LoaderState = self._checksums.state(position)
        if self._hidden is not None:
            found |= hidden_states(self._hidden) if position is None else self._attributes
        return found or None

    def forget_before(self, position: int) -> None:
        """Drop states of earlier positions."""
        self._checksums.forget_before(position)

    def close(self) -> None:
        """End the epoch and shut down its workers."""
        iterator, self._iterator = self._iterator, None
        is_users = getattr(self.loader, "persistent_workers", False) or iterator is self.loader
        if not is_users:
            shut_down(iterator)


def hidden_state_of(loader: Any) -> HiddenState | None:
    """Return the state in an iterable's attributes; None = none."""
    if isinstance(loader, Iterator):
        return None
    if not isinstance(loader, DataLoader):
        return HiddenState({"loader": loader}, OF_DATA)
    names = ["sampler", "batch_sampler", "generator"]
    if not loader.num_workers:
        names.append("dataset")  # workers have their own copies
    owners = {name: getattr(loader, name) for name in names if getattr(loader, name) is not None}
    return HiddenState(owners, OF_DATA if "dataset" in owners else OF_SAMPLERS)


def hidden_states(hidden: HiddenState) -> LoaderState:
    """Return the checkpoint state of attributes, and the names of those that cannot be saved."""
    found: LoaderState = {"attributes": hidden.save()}
    return found | {"unsaved": hidden.unsaved} if hidden.unsaved else found


class Checksums:
    """Checksums of batches, to check that reloaded ones are the same.

    Of each batch the shapes and copies of the first values are kept, as it may be changed in place;
    the checksum is computed when a checkpoint is saved or compared.
    """

    def __init__(self) -> None:
        self._known: dict[int, list[Head]] = {}
        self._expected: tuple[int, int] | None = None

    def begin(self, saved: LoaderState) -> None:
        """Start an epoch with the checksums of a checkpoint."""
        self._known = {}
        found = saved.get("batches")
        if callable(found):
            found = found()
        self._expected = None if found is None else (found["num"], found["checksum"])

    def add(self, num: int, batch: Batch) -> bool:
        """Add the `num`-th batch of the epoch; return whether it differs from the saved one."""
        heads = self._known[num] = [_head_of(tensor) for tensor in _tensors_of(batch)]
        expected = self._expected
        return expected is not None and expected[0] == num and expected[1] != _checksum_of(heads)

    def state(self, position: int | None) -> LoaderState:
        """Return the checkpoint state after `position` batches; it is computed when it is saved."""
        if position is None or position not in self._known:
            return {}
        heads = self._known[position]
        return {"batches": lambda: {"num": position, "checksum": _checksum_of(heads)}}

    def forget_before(self, position: int) -> None:
        """Drop checksums of earlier positions."""
        for num in [num for num in self._known if num < position]:
            del self._known[num]


Head = tuple[torch.Size, Any]
"""The shape of a tensor, and an array with its first values; None = they are not compared."""


def _tensors_of(batch: Any) -> Iterable[Tensor]:
    """Return the tensors of a batch in the order of torch's pytree, faster in the common cases."""
    kind = type(batch)
    if kind is Tensor:
        return (batch,)
    if kind is dict:
        batch = list(batch.values())
    elif kind is not tuple and kind is not list:
        return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    found = []
    for part in batch:
        if type(part) is Tensor:
            found.append(part)
        else:
            found += _tensors_of(part)
    return found


def _head_of(tensor: Tensor) -> Head:
    is_plain = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided
    if not is_plain or tensor.is_quantized:
        return tensor.shape, None
    if tensor.dtype not in _OF_NUMPY or tensor.requires_grad or tensor.is_neg():
        return tensor.shape, _first_values(tensor.detach())
    if not tensor.is_contiguous():
        return tensor.shape, _first_values(tensor)
    return tensor.shape, tensor.numpy().ravel()[:_NUM_COMPARED].copy()  # 4 times as fast


def _first_values(tensor: Tensor) -> Tensor:
    """Return copies of the first values, without a copy of the rest."""
    while tensor.dim() > 1 and len(tensor) and tensor[0].numel() >= _NUM_COMPARED:
        tensor = tensor[0]
    rows = tensor[:_NUM_COMPARED] if tensor.dim() else tensor
    return rows.reshape(-1)[:_NUM_COMPARED].clone()


def _checksum_of(heads: Iterable[Head]) -> int:
    """Return a checksum of the shapes and first values of a batch's tensors."""
    found = 0
    for shape, values in heads:
        found = zlib.crc32(repr(tuple(shape)).encode(), found)
        if values is not None:
            found = zlib.crc32(repr(values.tolist()).encode(), found)
    return found


class SequenceSource(Source):
    """The batches of a list or a tuple; each of several ranks takes every n-th."""

    seeds_host = False
    keeps_state = False
    loader: list[Batch] | tuple[Batch, ...]

    def __init__(
        self, loader: list[Batch] | tuple[Batch, ...], split: Split, name: str = "train_dataloader"
    ) -> None:
        super().__init__(loader, name)
        self._split = split

    @override
    def begin(self, start: EpochStart) -> NumberedBatches:
        if self._split.count == 1 and not start.batch_idx and not start.skipped:
            return enumerate(self.loader)
        return self._divided(start)

    def _divided(self, start: EpochStart) -> NumberedBatches:
        index, num = self._split.index, self._split.per_batch
        places = range(start.offset, len(self.loader), num)
        for number, place in enumerate(places, start.batch_idx):
            if number in start.skipped:
                log_skipped(start.epoch, number)
                continue
            group = self.loader[place : place + num]
            if self._split.count == 1:
                yield number, group[0]
                continue
            sizes = tuple(map(size_of, group)) + (0,) * (num - len(group))
            is_padding = index >= len(group)
            batch = self.loader[-1] if is_padding else group[index]
            yield number, ShardedBatch(batch, ShardInfo(sizes, is_padding))


class StatefulSource(Source):
    """The batches of a loader with `state_dict`; its state belongs to the batch consumed.

    The state is taken after each batch, as the next may be prefetched. If the loader ends before
    the loaders of other ranks, the state before its last batch is kept, so that a resumed run
    yields that batch again.

    Args:
        loader: The loader.
        name: The argument's name, for messages.

    Cost:
        One `state_dict()` and a copy of it per batch.
    """

    reads_to_end = True

    def __init__(self, loader: Any, name: str = "train_dataloader") -> None:
        super().__init__(loader, name)
        self._owner = loader
        self._states: dict[int | None, Any] = {}
        self._first: Any = None

    @override
    def begin(self, start: EpochStart) -> NumberedBatches:
        saved = start.loader_state
        has_state = saved is not None and "state" in saved
        self._states.clear()
        if start.restores and not has_state and start.batch_idx:
            return super().begin(start)
        self.close()
        seed_generators(start.seeds.order)
        first = start.batch_idx
        if start.restores and saved is not None and has_state:
            first = self._restore(saved)
        elif start.restores and self._first is not None:
            self._owner.load_state_dict(copy.deepcopy(self._first))
        if self._iterator is None:
            self._iterator = start_iterator(self.loader)
        self.note(first)
        if self._first is None and not start.restores:
            self._first = self._states[first]
        return self._fetched(self._iterator, start, first)

    def _restore(self, saved: LoaderState) -> int:
        """Restore the loader's state; return the number of its next batch."""
        try:
            self._owner.load_state_dict(copy.deepcopy(saved["state"]))
            self._iterator = start_iterator(self.loader)
        except Exception as error:
            error.add_note(
                f"Raised while restoring the state of {self.name}. It may have been saved with "
                f"other options of the loader, such as another num_workers."
            )
            raise
        if saved["is_cut"]:  # the epoch was cut: the loader has batches left
            shut_down(self._iterator)
            self._iterator = start_iterator(self.loader)
        return int(saved["batch_idx"])

    @override
    def note(self, position: int | None) -> None:
        self._states[position] = copy.deepcopy(self._owner.state_dict())

    @override
    def state(self, position: int | None) -> LoaderState | None:
        """Return the state after `position` batches; None = after the last one."""
        is_cut = False
        if position is None:  # the end of an epoch
            is_cut, known = None not in self._states, 0
            where = max(self._numbers(), default=None) if is_cut else None
        else:
            if None in self._states:  # other ranks have batches left
                position = min(position, max(self._numbers(), default=0) - 1)
            where = max((n for n in self._numbers() if n <= position), default=None)
            known = where or 0
        if where not in self._states:
            return None
        return {"batch_idx": known, "state": self._states[where], "is_cut": is_cut}

    def _numbers(self) -> list[int]:
        return [number for number in self._states if number is not None]

    @override
    def forget_before(self, position: int) -> None:
        super().forget_before(position)
        for number in sorted(self._numbers())[:-2]:
            if number < position:
                del self._states[number]


# ---- messages


def log_skipped(epoch: int, number: int, items: Any = None) -> None:
    """Log that a batch of an epoch is skipped, and the indices of its samples if known."""
    which = "" if items is None else f" (samples {shown(items)})"
    _log_of_positions.info("Epoch %d: skipping batch %d%s.", epoch + 1, number, which)


def place_of(name: str, epoch: int, number: int, items: Any = None) -> str:
    """Return the note of an error raised while loading a batch."""
    which = "" if items is None else f", samples {shown(items)}"
    return f"raised while {name} loaded batch {number} of epoch {epoch + 1}{which}"


def shown(items: Any) -> str:
    """Format sample indices, truncated."""
    indices = items if isinstance(items, (list, tuple)) else [items]
    text = ", ".join(map(str, indices[:_MOST_SHOWN]))
    more = f" and {len(indices) - _MOST_SHOWN} more" if len(indices) > _MOST_SHOWN else ""
    return text + more
