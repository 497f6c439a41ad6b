"""Divide the draws of a loader over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count as numbers_from
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from modelzoo_trainer.callback import Batch
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.batches import batch_size_of, split_batch
from modelzoo_trainer.loading.sample_order import Draw, Watch, draws, is_sliced, order_of


@dataclass(frozen=True, slots=True)
class Split:
    """How ranks divide the draws of a loader.

    Batch k over all ranks consists of the draws from k * per_batch on: one for each rank, or one
    for all of them, and each takes a slice.

    Args:
        index: The data shard of this rank.
        count: Number of shards; with 1, batches are not wrapped in `ShardedBatch`.
        is_global: Whether a draw is for all ranks.
    """

    index: int = 0
    count: int = 1
    is_global: bool = False

    @property
    def per_batch(self) -> int:
        """Draws per batch over all ranks."""
        return 1 if self.is_global else self.count

    def sizes(self, num: int) -> tuple[int, ...]:
        """Return how many of `num` samples each rank takes."""
        count = self.count
        return tuple((i + 1) * num // count - i * num // count for i in range(count))

    def part(self, num: int) -> tuple[int, int]:
        """Return the slice [start, end) of `num` samples that this rank takes."""
        return self.index * num // self.count, (self.index + 1) * num // self.count


WHOLE: Final = Split()
"""For a single process, and for a loader that belongs to one rank."""


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """Metadata of a batch over all ranks; only `is_padding` differs between ranks.

    Args:
        sizes: Number of samples of each rank.
        is_padding: Whether this rank has none, and its batch is a padding batch.
    """

    sizes: tuple[int, ...]
    is_padding: bool

    @property
    def is_even(self) -> bool:
        """Whether all ranks have the same number of samples."""
        return min(self.sizes) == max(self.sizes)


class ShardedBatch(NamedTuple):
    """One rank's part of a batch; `info` is not a tuple, so it is not moved to a device."""

    batch: Batch
    info: ShardInfo

    @classmethod
    def whole(cls, batch: Batch) -> ShardedBatch:
        """Wrap the batch of a single process."""
        return cls(batch, ShardInfo((size_of(batch),), is_padding=False))

    def micro_batches(self, size: int) -> list[ShardedBatch]:
        """Split into micro-batches of at most `size` samples: the same number on every rank.

        A rank with too few samples repeats one of them as a padding batch.

        Raises:
            ConfigError: If the tensors differ in their number of samples.
        """
        sizes = self.info.sizes
        num = max(1, -(-max(sizes) // size))
        own = [] if self.info.is_padding else split_batch(self.batch, size)
        padding = split_batch(self.batch, 1)[0] if len(own) < num else None
        found = []
        for number in range(num):
            left = tuple(min(max(each - number * size, 0), size) for each in sizes)
            is_padding = number >= len(own)
            batch = padding if is_padding else own[number]
            found.append(ShardedBatch(batch, ShardInfo(left, is_padding)))
        return found


def size_of(batch: Batch) -> int:
    """Return the number of samples of a batch; 1 if unknown."""
    try:
        return batch_size_of(batch)
    except ConfigError:
        return 1


def even_part(loader: Any, split: Split, first: int = 0) -> list[Batch] | None:
    """Return this rank's batches of a list, if every batch divides evenly, else None.

    Even batches need no metadata: no padding, no sizes of other ranks.

    Args:
        loader: A dataloader; only lists and tuples can be inspected.
        split: How ranks divide it.
        first: Draws before batch 0.

    Cost:
        Reads the shapes of all batches.
    """
    if type(loader) not in (list, tuple) or split.is_global or (len(loader) - first) % split.count:
        return None
    if len(set(map(size_of, loader))) > 1:
        return None
    return list(loader[first + split.index :: split.count])


def is_split_already(loader: DataLoader[Any]) -> bool:
    """Return whether the loader's own sampler gives each rank other samples."""
    batches = loader.batch_sampler
    samplers = (batches, getattr(batches, "sampler", None), loader.sampler)
    return any(
        getattr(sampler, "num_replicas", 1) > 1
        for sampler in samplers
        if isinstance(sampler, DistributedSampler)
        or (type(getattr(sampler, "num_replicas", None)) is int and hasattr(sampler, "rank"))
    )


def drops_last(loader: Any) -> bool:
    """Return whether an incomplete last batch is dropped."""
    return getattr(getattr(loader, "batch_sampler", None), "drop_last", False) is True


def num_batches(num_draws: int, split: Split, *, drops: bool, first: int = 0) -> int:
    """Return the number of batches of an epoch over all ranks.

    Args:
        num_draws: Draws of the loader in an epoch.
        split: How ranks divide them.
        drops: Whether an incomplete last batch is dropped.
        first: Draws before batch 0.
    """
    left = max(num_draws - first, 0)
    return left // split.per_batch if drops else -(-left // split.per_batch)


def shard_draws(
    loader: DataLoader[Any],
    split: Split,
    start: tuple[int, int],
    *,
    seed: int,
    epoch: int,
    watch: Watch | None = None,
) -> Iterator[Draw]:
    """Yield the draws that this rank loads in an epoch.

    An incomplete last batch is divided evenly, or dropped with `drop_last`. The draws of a custom
    batch sampler are divided whatever their sizes.

    Args:
        loader: A loader of a map-style dataset.
        split: How ranks divide it.
        start: Number of the first batch, and draws to skip.
        seed: The seed of the order; equal on all ranks.
        epoch: The number of the epoch.
        watch: See `draws`.
    """
    if split.count == 1:
        return draws(loader, seed=seed, epoch=epoch, start=start[1], watch=watch)
    batches = loader.batch_sampler
    if batches is not None and is_sliced(loader):
        return _spans(loader, split, start, seed=seed, epoch=epoch)
    number = start[0]
    found = draws(loader, seed=seed, epoch=epoch, start=start[1], watch=watch)
    if batches is None:
        return _singles(found, split, number)
    size = batches.batch_size if type(batches) is BatchSampler else 0
    return _groups(found, split, number, least=size * split.per_batch, drops=drops_last(loader))


def _spans(
    loader: DataLoader[Any], split: Split, start: tuple[int, int], *, seed: int, epoch: int
) -> Iterator[Draw]:
    """Slice an order that is known completely."""
    batches: Any = loader.batch_sampler
    order = order_of(loader, seed=seed, epoch=epoch)
    number, num_skipped = start
    span = batches.batch_size * split.per_batch
    sizes = split.sizes(span)
    for position in range(num_skipped * batches.batch_size, len(order), span):
        num = min(span, len(order) - position)
        if num < span:
            if batches.drop_last:
                return
            sizes = split.sizes(num)
        begin, end = split.part(num)
        is_padding = begin == end
        if is_padding:
            begin, end = 0, 1
        part = order[position + begin : position + end]
        items = part.tolist() if isinstance(part, np.ndarray) else list(part)
        yield Draw(number, items, position + begin, sizes, is_padding)
        number += 1


def _groups(
    found: Iterator[Draw], split: Split, number: int, *, least: int, drops: bool
) -> Iterator[Draw]:
    """Divide the draws of a sampler that must be iterated.

    A batch of fewer than `least` samples is divided evenly; `drops` drops incomplete batches.
    """
    for idx in numbers_from(number):
        group = list(islice(found, split.per_batch))
        is_full = len(group) == split.per_batch
        if not group or (drops and not is_full):
            return
        lengths = tuple(len(draw.items) for draw in group)
        if is_full and not split.is_global and sum(lengths) >= least:
            own = group[split.index]
            yield Draw(idx, own.items, own.position, lengths, is_padding=False)
            continue
        items = [item for draw in group for item in draw.items]
        begin, end = split.part(len(items))
        is_padding = begin == end
        if is_padding:
            begin, end = 0, 1
        sizes, position = split.sizes(len(items)), group[0].position + begin
        yield Draw(idx, items[begin:end], position, sizes, is_padding)


def _singles(found: Iterator[Draw], split: Split, number: int) -> Iterator[Draw]:
    """Divide draws of one item each."""
    for idx in numbers_from(number):
        group = list(islice(found, split.count))
        if not group:
            return
        is_padding = split.index >= len(group)
        own = group[0 if is_padding else split.index]
        yield Draw(idx, own.items, own.position, None, is_padding)
