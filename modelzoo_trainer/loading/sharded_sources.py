"""Batches of one of several processes: where they come from, for each kind of loader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, cast

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from modelzoo_trainer.callback import Batch
from modelzoo_trainer.data.batches import batch_size_of, split_batch
from modelzoo_trainer.data.processor import BatchDataset
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.dataloader import can_be_positioned, log_skipped
from modelzoo_trainer.loading.per_sample import collates_plainly
from modelzoo_trainer.loading.shard_layout import Share, Split, is_split_already
from modelzoo_trainer.loading.sources import (
    LoaderState,
    Numbered,
    PositionedSource,
    SequenceSource,
    Source,
    Start,
    StatefulSource,
    owner_of_state,
)


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What a process knows of a batch that all share, equal on all but for `is_padding`.

    Args:
        sizes: How many samples each process has.
        is_padding: Whether this process has none, and its batch stands for nothing.
    """

    sizes: tuple[int, ...]
    is_padding: bool

    @property
    def is_even(self) -> bool:
        """Whether all processes have the same number of samples."""
        return min(self.sizes) == max(self.sizes)


class Shared(NamedTuple):
    """A batch of this process; the facts are no tuple, so that nothing moves them to a device."""

    batch: Batch
    facts: ShardInfo


ShardedItems = Iterator[tuple[Shared, bool, int]]


def size_of(batch: Batch) -> int:
    """Return the number of samples of a batch; one of which it is not known counts as one."""
    try:
        return batch_size_of(batch)
    except ConfigError:
        return 1


def parts_of(shared: Shared, size: int) -> list[Shared]:
    """Return a batch in parts of at most `size` samples: as many on every process.

    A process whose samples do not suffice gets one of them again, as a padding batch.

    Args:
        shared: The batch.
        size: Samples of a part, > 0.

    Raises:
        ConfigError: If the tensors do not have as many samples as one another.
    """
    batch, facts = shared
    num = max(1, -(-max(facts.sizes) // size))
    own = [] if facts.is_padding else split_batch(batch, size)
    padding = split_batch(batch, 1)[0] if len(own) < num else None
    parts = []
    for number in range(num):
        sizes = tuple(min(max(each - number * size, 0), size) for each in facts.sizes)
        is_padding = number >= len(own)
        parts.append(Shared(padding if is_padding else own[number], ShardInfo(sizes, is_padding)))
    return parts


log = logging.getLogger("modelzoo_trainer.data")

Exchange = Callable[[int], list[int]]

_ENDED = -1
_NEVER_BEGUN = -2


def split_of(loader: Iterable[Batch], shard: tuple[int, int], name: str) -> Split | None:
    """Return how processes divide a loader; None = each process's loader is its own affair.

    Args:
        loader: The loader.
        shard: Which part of the data this process reads, and of how many.
        name: The argument's name, for the message.

    Raises:
        ConfigError: If its batches are for all processes, but cannot be divided by them.
    """
    is_global = getattr(loader, "is_global_batch", False) is True
    has_state = owner_of_state(loader) is not None
    if isinstance(loader, (list, tuple)) and not has_state:
        return Split(*shard)
    if (
        not has_state
        and can_be_positioned(loader)
        and not is_split_already(cast("DataLoader[Any]", loader))
    ):
        if is_global:
            _check_global(cast("DataLoader[Any]", loader).batch_size, shard[1], name)
        return Split(*shard, is_global=is_global)
    if is_global:
        raise ConfigError(
            f"{name} ({type(loader).__name__}) has is_global_batch set, but {shard[1]} processes "
            f"cannot divide its batches: that takes a torch DataLoader over a data set with "
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


def make_sharded_source(
    loader: Iterable[Batch], split: Split | None, shard: tuple[int, int], exchange: Exchange
) -> Source:
    """Return where the batches of a loader come from.

    Args:
        loader: The loader.
        split: What `split_of` said of it.
        shard: Which part of the data this process reads, and of how many.
        exchange: The backend's: returns the numbers of all processes. Collective.
    """
    if split is not None:
        if isinstance(loader, (list, tuple)):
            return ShardedSequence(loader, split)
        return ShardedPositioned(cast("DataLoader[Any]", loader), split, exchange)
    owner = owner_of_state(loader)
    if owner is not None:
        return ShardedStateful(loader, owner, shard=shard, exchange=exchange)
    if can_be_positioned(loader):
        return PresplitSource(cast("DataLoader[Any]", loader), shard=shard, exchange=exchange)
    return UnsizedShardedSource(loader, shard=shard, exchange=exchange)


class ShardedSequence(SequenceSource):
    """The batches of a list that all processes have: each takes every so manieth of them.

    Args:
        loader: The list.
        split: How it is divided.
    """

    def __init__(self, loader: list[Batch] | tuple[Batch, ...], split: Split) -> None:
        super().__init__(loader)
        self._split = split

    @override
    def begin(self, start: Start) -> Numbered:
        num = self._split.per_batch
        batches = self.loader
        places = range(start.offset(num), len(batches), num)
        for number, place in enumerate(places, start.position):
            if number in start.passed_over:
                log_skipped(start.epoch, number)
                continue
            group = batches[place : place + num]
            sizes = tuple(map(size_of, group)) + (0,) * (num - len(group))
            is_padding = self._split.index >= len(group)
            batch = batches[-1] if is_padding else group[self._split.index]
            yield number, Shared(batch, ShardInfo(sizes, is_padding))


class ShardedPositioned(PositionedSource):
    """This process's part of a plain torch loader over samples with indices.

    How many samples each process has is known from the order. Where samples are put together by
    a function of the user's, the first batch of a pass shows whether it keeps their number; if
    not, or if samples are not batched, the numbers are exchanged with each batch.

    Args:
        loader: The loader.
        split: How it is divided.
        exchange: Returns the numbers of all processes. Collective.
    """

    def __init__(self, loader: DataLoader[Any], split: Split, exchange: Exchange) -> None:
        super().__init__(loader)
        self._split = split
        self._exchange = exchange
        puts_together = collates_plainly(loader.collate_fn) and (
            isinstance(loader.dataset, BatchDataset)
            or getattr(loader.dataset, "__getitems__", None) is None
        )
        self._keeps_number = puts_together and loader.batch_sampler is not None

    @override
    def begin(self, start: Start) -> Numbered:
        self.warn_of_order(start)
        found = self._positioned.begin_share(
            self._split,
            (start.position, start.offset(self._split.per_batch)),
            epoch=start.epoch,
            seeds=(start.seeds.order, start.seeds.samples),
            passed_over=start.passed_over,
        )
        return self._told(found, asks=start.needs_sizes and not self._keeps_number)

    def _told(self, found: Iterator[tuple[Share, Batch]], *, asks: bool) -> Numbered:
        is_trusted = self._keeps_number
        is_first = not is_trusted
        for share, batch in found:
            sizes = share.sizes
            if sizes is None or is_first or not is_trusted:
                told = tuple(self._exchange(0 if share.is_padding else size_of(batch)))
                is_trusted = told == sizes and not asks
                is_first, sizes = False, told
            yield share.number, Shared(batch, ShardInfo(sizes, share.is_padding))


class UnsizedShardedSource(Source):
    """The batches of any iterable, of which each process has its own.

    A pass is over when all processes' loaders are: one that ends earlier gives its last batch
    again and again, as a padding batch.

    Args:
        *arguments: Of the source that this stands before.
        shard: Which part of the data this process reads, and of how many.
        exchange: Returns the numbers of all processes. Collective.

    Cost:
        An exchange of one number among the hosts with each batch, fetched one ahead.
    """

    reads_to_end = True

    def __init__(self, *arguments: Any, shard: tuple[int, int], exchange: Exchange) -> None:
        super().__init__(*arguments)
        self.shard = shard
        self._exchange = exchange
        self._last: Batch = None
        self._has_last = False

    @override
    def begin(self, start: Start) -> Numbered:
        self._last, self._has_last = None, False
        return self._agreed(super().begin(start), start)

    @override
    def _fetched(self, iterator: Iterator[Batch], start: Start, first: int) -> Numbered:
        return super()._fetched(self._remembering(iterator), start, first)

    def _remembering(self, iterator: Iterator[Batch]) -> Iterator[Batch]:
        for batch in iterator:
            self._last, self._has_last = batch, True
            yield batch

    def _agreed(self, items: Numbered, start: Start) -> Numbered:
        numbers = (number for number in count(start.position) if number not in start.passed_over)
        for number in numbers:
            found = next(items, None)
            if found is not None:
                self._last, self._has_last = found[1], True
            told = self._sizes(found)
            if max(told) < 0:
                return
            if min(told) == _NEVER_BEGUN:
                self._refuse(told)
            sizes = tuple(max(size, 0) for size in told)
            yield number, Shared(self._last, ShardInfo(sizes, found is None))

    def _sizes(self, found: tuple[int, Batch] | None) -> list[int]:
        if found is None:
            return self._exchange(_ENDED if self._has_last else _NEVER_BEGUN)
        return self._exchange(size_of(found[1]))

    def _refuse(self, told: list[int]) -> None:
        empty = ", ".join(str(idx) for idx, size in enumerate(told) if size == _NEVER_BEGUN)
        raise ConfigError(
            f"the dataloader ({type(self.loader).__name__}) yields no batch for part {empty} of "
            f"the data, of {len(told)} parts in all, but does for others. Give each process at "
            f"least one batch a pass."
        )


class PresplitSource(UnsizedShardedSource, PositionedSource):
    """A torch loader with a sampler that has divided the samples already, as torch's does."""

    @override
    def _sizes(self, found: tuple[int, Batch] | None) -> list[int]:
        batches = self.loader.batch_sampler
        sampler = self.loader.sampler if batches is None else getattr(batches, "sampler", None)
        is_even = type(sampler) is DistributedSampler and sampler.num_replicas == self.shard[1]
        if is_even and collates_plainly(self.loader.collate_fn) and batches is not None:
            return [_NEVER_BEGUN if found is None else size_of(found[1])] * self.shard[1]
        return super()._sizes(found)


class ShardedStateful(UnsizedShardedSource, StatefulSource):
    """The batches of a loader that keeps its own state, of which each process has its own.

    Of one that has ended before the others, the state before its last batch is kept, so that a
    run that resumes has that again.
    """

    @override
    def state(self, position: int | None) -> LoaderState | None:
        if position is not None and None in self._states:
            position = min(position, max(self._numbers(), default=0) - 1)
        return super().state(position)

    @override
    def forget_before(self, position: int) -> None:
        kept = sorted(self._numbers())[-2:]
        for number in self._numbers():
            if number < position and number not in kept:
                del self._states[number]
