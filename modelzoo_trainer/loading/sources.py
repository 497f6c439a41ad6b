"""Where the batches of an epoch come from, for each kind of loader and any number of processes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any, Final

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from modelzoo_trainer.callback import Batch
from modelzoo_trainer.data.processor import BatchDataset
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.dataloader import PositionedLoader, can_be_positioned, log_skipped
from modelzoo_trainer.loading.per_sample import collates_plainly, mixed, seed_generators
from modelzoo_trainer.loading.position import EpochStart
from modelzoo_trainer.loading.sample_order import Draw
from modelzoo_trainer.loading.sharding import (
    WHOLE,
    ShardedBatch,
    ShardInfo,
    Split,
    is_split_already,
    size_of,
)
from modelzoo_trainer.loading.workers import shut_down, start_iterator

log = logging.getLogger("modelzoo_trainer.data")

Numbered = Iterator[tuple[int, Any]]  # a Batch, or with several processes a ShardedBatch
LoaderState = dict[str, Any]
Exchange = Callable[[int], list[int]]

_ENDED: Final = -1
_NEVER_BEGUN: Final = -2


class Source:
    """The batches of any iterable: what was trained on is loaded again and dropped.

    `seeds_host` says whether the generators of this process are seeded while batches are fetched,
    `reads_to_end` whether an epoch is over when the loader says so, whatever its length.

    Args:
        loader: The iterable.
    """

    seeds_host = True
    reads_to_end = False

    def __init__(self, loader: Iterable[Batch]) -> None:
        self.loader = loader
        self.latest: tuple[Batch] | None = None
        """What was fetched last in the epoch, also if it was dropped; None = nothing."""
        self._iterator: Iterator[Batch] | None = None

    def begin(self, start: EpochStart) -> Numbered:
        """Return an iterator over the numbers and batches of an epoch."""
        self.close()
        num = start.num_before + start.batch_idx
        if num:
            log.warning(
                "train_dataloader (%s) cannot begin in the middle of an epoch: %d batches are "
                "loaded and dropped. To begin at once, pass a torch DataLoader over a data set "
                "with indices, or give the loader state_dict() and load_state_dict().",
                type(self.loader).__name__,
                num,
            )
        seed_generators(start.seeds.order)
        self._iterator = start_iterator(self.loader)
        for _ in islice(self._iterator, start.num_before):
            pass
        return self._fetched(self._iterator, start, 0)

    def _fetched(self, iterator: Iterator[Batch], start: EpochStart, first: int) -> Numbered:
        self.latest = None
        for number in count(first):
            seed_generators(mixed(start.seeds.fetches, number))
            try:
                batch = next(iterator)
            except StopIteration:
                self.note(None)
                return
            self.latest = (batch,)
            self.note(number + 1)
            if number < start.batch_idx:
                continue
            if number in start.skipped:
                log_skipped(start.epoch, number)
                continue
            yield number, batch

    def note(self, position: int | None) -> None:
        """Note that `position` batches have been fetched; None = all."""

    def state(self, position: int | None) -> LoaderState | None:
        """Return the loader's own state after `position` batches; None = after a whole epoch."""
        return None

    def forget_before(self, position: int) -> None:
        """Drop the states from before a position."""

    def close(self) -> None:
        """End the epoch, and workers that were started for it."""
        iterator, self._iterator = self._iterator, None
        is_users = getattr(self.loader, "persistent_workers", False) or iterator is self.loader
        if not is_users:
            shut_down(iterator)


class SequenceSource(Source):
    """The batches of a list or a tuple: of several processes each takes every n-th."""

    seeds_host = False
    loader: list[Batch] | tuple[Batch, ...]

    def __init__(self, loader: list[Batch] | tuple[Batch, ...], split: Split) -> None:
        super().__init__(loader)
        self._split = split

    @override
    def begin(self, start: EpochStart) -> Numbered:
        if self._split.count == 1 and not start.batch_idx and not start.skipped:
            return enumerate(self.loader)
        return self._divided(start)

    def _divided(self, start: EpochStart) -> Numbered:
        index, num = self._split.index, self._split.per_batch
        places = range(start.offset(num), len(self.loader), num)
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


class PositionedSource(Source):
    """The batches of a plain torch loader over samples with indices, see `PositionedLoader`.

    How many samples each of several processes has is known from the order. Where samples are put
    together by a function of the user's, the first batch of an epoch shows whether it keeps their
    number; if not, or if samples are not batched, the numbers are exchanged with each batch.

    Args:
        loader: The loader.
        split: How processes divide it.
        exchange: Returns the numbers of all processes. Collective.
    """

    loader: DataLoader[Any]

    def __init__(self, loader: DataLoader[Any], split: Split, exchange: Exchange) -> None:
        super().__init__(loader)
        self._positioned = PositionedLoader(loader, split)
        self.seeds_host = self._positioned.seeds_host
        self._split = split
        self._exchange = exchange
        puts_together = collates_plainly(loader.collate_fn) and (
            isinstance(loader.dataset, BatchDataset)
            or getattr(loader.dataset, "__getitems__", None) is None
        )
        self._keeps_number = puts_together and loader.batch_sampler is not None

    @override
    def begin(self, start: EpochStart) -> Numbered:
        if start.batch_idx and self.loader.num_workers and not self.loader.in_order:
            log.warning(
                "train_dataloader has in_order=False: which batches were trained on before is not "
                "known, the first %d of the epoch are skipped. Exactness is not guaranteed.",
                start.batch_idx,
            )
        items = self._positioned.begin(start)
        if self._split.count > 1:
            return self._sharded(items, needs_sizes=start.needs_sizes)
        return ((draw.number, batch) for draw, batch in items)

    def _sharded(self, items: Iterator[tuple[Draw, Batch]], *, needs_sizes: bool) -> Numbered:
        keeps_number: bool | None = True if self._keeps_number else None  # None = not known yet
        for draw, batch in items:
            sizes = draw.sizes
            if sizes is None or not keeps_number:
                sizes = tuple(self._exchange(0 if draw.is_padding else size_of(batch)))
                if keeps_number is None:
                    keeps_number = sizes == draw.sizes and not needs_sizes
            yield draw.number, ShardedBatch(batch, ShardInfo(sizes, draw.is_padding))

    @override
    def close(self) -> None:
        self._positioned.close()


class StatefulSource(Source):
    """The batches of a loader that keeps its own state: of the batch consumed, not of the fetched.

    The state is taken after each batch, as the next may be fetched before it is needed. Of a loader
    that has ended before those of other processes, the state before its last batch is kept, so that
    a run that resumes has that again.

    Args:
        loader: The loader.
        owner: What has `state_dict` and `load_state_dict`: the loader, or its data set.

    Cost:
        A `state_dict()` and a copy of it each batch.
    """

    reads_to_end = True

    def __init__(self, loader: Iterable[Batch], owner: Any) -> None:
        super().__init__(loader)
        self._owner = owner
        self._states: dict[int | None, Any] = {}
        self._first: Any = None

    @override
    def begin(self, start: EpochStart) -> Numbered:
        saved = start.loader_state
        self._states.clear()
        if start.restores and saved is None and start.batch_idx:
            return super().begin(start)
        self.close()
        seed_generators(start.seeds.order)
        first = start.batch_idx
        if start.restores and saved is not None:
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
        """Give the loader its state; return the number of the batch that comes next."""
        try:
            self._owner.load_state_dict(copy.deepcopy(saved["state"]))
            self._iterator = start_iterator(self.loader)
        except Exception as error:
            error.add_note(
                "raised when train_dataloader got its state back; it may have been saved with "
                "other options of the loader, such as another num_workers"
            )
            raise
        if saved["is_cut"]:  # the epoch was over, though not for the loader: it begins the next one
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
            if None in self._states:  # other processes go on
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
        for number in sorted(self._numbers())[:-2]:
            if number < position:
                del self._states[number]


# ---- which kind a loader is


def owner_of_state(loader: Any) -> Any:
    """Return what has the loader's own state: itself, its data set, or None."""
    if _has_state(loader):
        return loader
    if type(loader) is DataLoader and not loader.num_workers and not can_be_positioned(loader):
        return loader.dataset if _has_state(loader.dataset) else None
    return None


def _has_state(owner: Any) -> bool:
    return callable(getattr(owner, "state_dict", None)) and callable(
        getattr(owner, "load_state_dict", None)
    )


def split_of(loader: Any, shard: tuple[int, int], name: str) -> Split | None:
    """Return how processes divide a loader; None = each process's loader is its own.

    `shard` is which part of the data this process reads, and of how many.

    Raises:
        ConfigError: If its batches are for all processes, but cannot be divided by them.
    """
    if shard[1] == 1:
        return WHOLE
    is_global = getattr(loader, "is_global_batch", False) is True
    if owner_of_state(loader) is None:
        if isinstance(loader, (list, tuple)):
            return Split(*shard)
        if can_be_positioned(loader) and not is_split_already(loader):
            if is_global:
                _check_global(loader.batch_size, shard[1], name)
            return Split(*shard, is_global=is_global)
    if is_global:
        raise ConfigError(
            f"{name} ({type(loader).__name__}) has is_global_batch set, but {shard[1]} processes "
            f"cannot divide its batches: that requires a torch DataLoader over a data set with "
            f"indices, without a DistributedSampler. Leave is_global_batch out."
        )
    return None


def _check_global(size: int | None, num: int, name: str) -> None:
    if size is None or not size % num:
        return
    lower = size - size % num
    fits = f"{lower} or {lower + num}" if lower else f"{num}"
    raise ConfigError(
        f"{name}: global_batch_size is {size}, which {num} processes cannot divide evenly. Use "
        f"{fits}, or another number of processes."
    )


def make_source(loader: Any, split: Split | None, exchange: Exchange) -> Source:
    """Return where the batches of a loader come from.

    `split` is what `split_of` returned for it; `exchange` returns the numbers of all processes.
    """
    owner = owner_of_state(loader)
    if owner is not None:
        return StatefulSource(loader, owner)
    if isinstance(loader, (list, tuple)):
        return SequenceSource(loader, split or WHOLE)
    if can_be_positioned(loader):
        return PositionedSource(loader, split or WHOLE, exchange)
    return Source(loader)


# ---- loaders of which each process has its own


def until_all_end(
    items: Numbered, source: Source, start: EpochStart, num_shards: int, exchange: Exchange
) -> Numbered:
    """Yield a source's batches until those of all processes have ended.

    One that ends before the others yields its last batch again and again, as a padding batch. The
    processes exchange a number with each batch, unless a sampler gives each as many samples.

    Args:
        items: What the source has begun.
        source: This process's own.
        start: Where the epoch begins.
        num_shards: How many processes there are.
        exchange: Returns the numbers of all processes. Collective.

    Raises:
        ConfigError: If some have no batch at all, and others have.
    """
    latest: tuple[Batch] | None = None
    is_even = isinstance(source, PositionedSource) and _is_even(source.loader, num_shards)
    for number in count(start.batch_idx):
        if number in start.skipped:
            continue
        found = next(items, None)
        if found is not None:
            own, latest = size_of(found[1]), (found[1],)
        else:
            latest = source.latest or latest
            own = _ENDED if latest else _NEVER_BEGUN
        sizes = [own] * num_shards if is_even else exchange(own)
        if max(sizes) < 0:
            return
        if latest is None or min(sizes) == _NEVER_BEGUN:
            raise _no_batch(source.loader, sizes)
        info = ShardInfo(tuple(max(size, 0) for size in sizes), is_padding=found is None)
        yield number, ShardedBatch(latest[0], info)


def _is_even(loader: DataLoader[Any], num_shards: int) -> bool:
    """Return whether torch's sampler gives each process as many samples, in batches of them."""
    batches = loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    is_divided = type(sampler) is DistributedSampler and sampler.num_replicas == num_shards
    return is_divided and collates_plainly(loader.collate_fn)


def _no_batch(loader: Any, sizes: list[int]) -> ConfigError:
    empty = ", ".join(str(idx) for idx, size in enumerate(sizes) if size == _NEVER_BEGUN)
    return ConfigError(
        f"the dataloader ({type(loader).__name__}) yields no batch for part {empty} of the data, "
        f"of {len(sizes)} parts in all, but does for others. Give each process at least one batch "
        f"an epoch."
    )
