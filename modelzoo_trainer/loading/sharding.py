"""How processes divide what a loader draws; a single process takes all of it."""

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
from modelzoo_trainer.data.batches import batch_size_of, split_batch
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.sample_order import Draw, Watch, draws, is_sliced, order_of


@dataclass(frozen=True, slots=True)
class Split:
    """How processes divide what a loader draws.

    Batch k of all processes is made of the draws k * per_batch and following: one for each
    process, or one for all of them, of which each takes a slice.

    Args:
        index: Which part is this process's.
        count: How many parts there are; of one, batches are not marked (`ShardedBatch`).
        is_global: Whether a draw is for all processes.
    """

    index: int = 0
    count: int = 1
    is_global: bool = False

    @property
    def per_batch(self) -> int:
        """Draws that make a batch of all processes."""
        return 1 if self.is_global else self.count

    def sizes(self, num: int) -> tuple[int, ...]:
        """Return how many of `num` samples each process takes."""
        count = self.count
        return tuple((i + 1) * num // count - i * num // count for i in range(count))

    def part(self, num: int) -> tuple[int, int]:
        """Return where this process's part of `num` samples begins, and where it ends."""
        return self.index * num // self.count, (self.index + 1) * num // self.count


WHOLE: Final = Split()
"""What a single process takes, and one whose loader is its own."""


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What a process knows of a batch of all processes; only `is_padding` differs among them.

    Args:
        sizes: How many samples each process has.
        is_padding: Whether this process has none, and its batch counts nothing.
    """

    sizes: tuple[int, ...]
    is_padding: bool

    @property
    def is_even(self) -> bool:
        """Whether all processes have the same number of samples."""
        return min(self.sizes) == max(self.sizes)


class ShardedBatch(NamedTuple):
    """One process's part of a batch; `info` is no tuple, so that nothing moves it to a device."""

    batch: Batch
    info: ShardInfo

    @classmethod
    def whole(cls, batch: Batch) -> ShardedBatch:
        """Return a batch of a single process."""
        return cls(batch, ShardInfo((size_of(batch),), is_padding=False))

    def micro_batches(self, size: int) -> list[ShardedBatch]:
        """Return it in micro-batches of at most `size` samples: as many on every process.

        A process whose samples do not suffice gets one of them again, as a padding batch.

        Raises:
            ConfigError: If the tensors do not have as many samples as one another.
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
    """Return the number of samples of a batch; one of which it is not known counts as one."""
    try:
        return batch_size_of(batch)
    except ConfigError:
        return 1


def even_part(loader: Any, split: Split, first: int = 0) -> list[Batch] | None:
    """Return this process's batches of a list whose every batch is even, else None.

    Then there is nothing to know of a batch besides: no padding, no sizes of other processes.

    Args:
        loader: A dataloader; only of lists and tuples the batches are there to be looked at.
        split: How the processes divide it.
        first: Draws before batch 0.

    Cost:
        A look at the shapes of all batches.
    """
    if type(loader) not in (list, tuple) or split.is_global or (len(loader) - first) % split.count:
        return None
    if len(set(map(size_of, loader))) > 1:
        return None
    return list(loader[first + split.index :: split.count])


def is_split_already(loader: DataLoader[Any]) -> bool:
    """Return whether a sampler of the loader's own gives each process other samples."""
    batches = loader.batch_sampler
    samplers = (batches, getattr(batches, "sampler", None), loader.sampler)
    return any(
        getattr(sampler, "num_replicas", 1) > 1
        for sampler in samplers
        if isinstance(sampler, DistributedSampler)
        or (type(getattr(sampler, "num_replicas", None)) is int and hasattr(sampler, "rank"))
    )


def drops_last(loader: Any) -> bool:
    """Return whether a batch that is not full is dropped."""
    return getattr(getattr(loader, "batch_sampler", None), "drop_last", False) is True


def num_batches(num_draws: int, split: Split, *, drops: bool, first: int = 0) -> int:
    """Return how many batches of all processes an epoch has.

    Args:
        num_draws: What the loader draws in an epoch.
        split: How they are divided.
        drops: Whether a batch that is not full is dropped.
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
    """Yield what this process loads in an epoch.

    The last batch of an epoch, if it is not full, is divided evenly, or dropped with `drop_last`.
    A batch sampler of the user's own is divided by its draws, whatever their sizes.

    Args:
        loader: Of a map-style data set.
        split: How the processes divide it.
        start: The number of the first batch, and how many draws to skip.
        seed: Of the order; equal on all processes.
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
    """Slice an order that is known as a whole."""
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
    """Divide what a sampler gives that must be asked for each draw.

    A batch of fewer than `least` samples is divided evenly; `drops` one that is not full.
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
