"""What several processes load of a pass: each its part of what the sampler gives to all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count as numbers_from
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from modelzoo_trainer.loading.sample_order import Draw, draws, is_sliced, order_of


@dataclass(frozen=True, slots=True)
class Split:
    """How processes divide what a loader draws.

    Batch k of all is made of the draws k * per_batch and following: one for each process, or one
    for all of them, of which each takes a slice.

    Args:
        index: Which part is this process's.
        count: How many parts there are.
        is_global: Whether a draw is for all processes.
    """

    index: int
    count: int
    is_global: bool = False

    @property
    def per_batch(self) -> int:
        """Draws that make a batch of all processes."""
        return 1 if self.is_global else self.count

    def sizes(self, num: int) -> tuple[int, ...]:
        """Return how many of so many samples each process takes."""
        count = self.count
        return tuple((i + 1) * num // count - i * num // count for i in range(count))

    def part(self, num: int) -> tuple[int, int]:
        """Return where this process's part of so many samples begins, and where it ends."""
        return self.index * num // self.count, (self.index + 1) * num // self.count


class Share(NamedTuple):
    """What one process loads of a batch of all.

    Args:
        number: How many batches there were before in the pass.
        items: Its indices; one index if samples are not batched.
        position: Samples of the pass before these; None = no sample comes twice in a pass.
        sizes: How many samples each process has; None = not known before they are loaded.
        is_padding: Whether there is none for this process: `items` are then somebody else's.
    """

    number: int
    items: Any
    position: int | None
    sizes: tuple[int, ...] | None
    is_padding: bool


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
    """Return whether a batch that is not full is left out."""
    return getattr(getattr(loader, "batch_sampler", None), "drop_last", False) is True


def num_shares(num_draws: int, split: Split, *, drops: bool, first: int = 0) -> int:
    """Return how many batches of all processes a pass has.

    Args:
        num_draws: What the loader draws in a pass.
        split: How they are divided.
        drops: Whether a batch that is not full is left out.
        first: Draws that are left out before batch 0.
    """
    left = max(num_draws - first, 0)
    return left // split.per_batch if drops else -(-left // split.per_batch)


def shares(
    loader: DataLoader[Any], split: Split, place: tuple[int, int], *, seed: int, epoch: int
) -> Iterator[Share]:
    """Yield what this process loads in a pass.

    The last batch of a pass, if it is not full, is divided evenly, or left out with `drop_last`.
    A batch sampler of the user's own is divided by its draws, whatever their sizes.

    Args:
        loader: Of a map-style data set.
        split: How the processes divide it.
        place: The number of the first batch, and how many draws to leave out.
        seed: Of the order; equal on all processes.
        epoch: The number of the pass.
    """
    batches = loader.batch_sampler
    if batches is not None and is_sliced(loader):
        return _spans(loader, split, place, seed=seed, epoch=epoch)
    number, start = place
    found = draws(loader, seed=seed, epoch=epoch, start=start)
    if batches is None:
        return _singles(found, split, number)
    size = batches.batch_size if type(batches) is BatchSampler else 0
    return _groups(found, split, number, least=size * split.per_batch, drops=drops_last(loader))


def _spans(
    loader: DataLoader[Any], split: Split, place: tuple[int, int], *, seed: int, epoch: int
) -> Iterator[Share]:
    """Slice an order that is known as a whole."""
    batches: Any = loader.batch_sampler
    order, repeats = order_of(loader, seed=seed, epoch=epoch)
    number, start = place
    span = batches.batch_size * split.per_batch
    sizes = split.sizes(span)
    for position in range(start * batches.batch_size, len(order), span):
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
        yield Share(number, items, position + begin if repeats else None, sizes, is_padding)
        number += 1


def _groups(
    found: Iterator[Draw], split: Split, number: int, *, least: int, drops: bool
) -> Iterator[Share]:
    """Divide what a sampler gives that must be asked for each draw.

    Args:
        found: Its draws.
        split: How they are divided.
        number: Of the first batch.
        least: Samples below which a batch is divided evenly.
        drops: Whether a batch that is not full is left out.
    """
    for idx in numbers_from(number):
        group = list(islice(found, split.per_batch))
        is_full = len(group) == split.per_batch
        if not group or (drops and not is_full):
            return
        lengths = tuple(len(draw.items) for draw in group)
        if is_full and not split.is_global and sum(lengths) >= least:
            own = group[split.index]
            yield Share(idx, own.items, own.position, lengths, is_padding=False)
            continue
        items = [item for draw in group for item in draw.items]
        begin, end = split.part(len(items))
        is_padding = begin == end
        if is_padding:
            begin, end = 0, 1
        first = group[0].position
        position = None if first is None else first + begin
        yield Share(idx, items[begin:end], position, split.sizes(len(items)), is_padding)


def _singles(found: Iterator[Draw], split: Split, number: int) -> Iterator[Share]:
    """Divide draws of one item each."""
    for idx in numbers_from(number):
        group = list(islice(found, split.count))
        if not group:
            return
        is_padding = split.index >= len(group)
        own = group[0 if is_padding else split.index]
        yield Share(idx, own.items, own.position, None, is_padding)
