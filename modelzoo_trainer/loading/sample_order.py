"""The draws of a loader's sampler in an epoch, from any position, without loading samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from modelzoo_trainer.loading.batch_seeds import mixed, seed_generators
from modelzoo_trainer.loading.seeded_sampler import SeededSampler
from modelzoo_trainer.loading.stream import IndexStream, StreamSampler

Order = Sequence[Any] | NDArray[Any] | IndexStream

_CHUNK: Final = 4096  # indices converted to Python objects at a time


class Draw(NamedTuple):
    """Indices that a rank loads together.

    Args:
        number: Number of earlier draws in the epoch.
        items: The indices; one index if samples are not batched.
        position: Samples of the epoch before these, on all ranks.
        sizes: Number of samples of each rank; None = not known before loading, or a single process.
        is_padding: Whether this rank has none: `items` belong to another rank.
    """

    number: int
    items: Any
    position: int
    sizes: tuple[int, ...] | None = None
    is_padding: bool = False


class OrderSeed(NamedTuple):
    """The seed of an order.

    Args:
        seed: The seed of the epoch.
        epoch: The number of the epoch.
        skips: Whether torch's iterator draws a number before the sampler does.
    """

    seed: int
    epoch: int
    skips: bool

    def generator(self, own: torch.Generator | None) -> torch.Generator:
        """Return the sampler's generator: equal for equal epochs.

        Args:
            own: The sampler's own generator. Only its seed is used; it is not changed.
        """
        if own is not None:
            return torch.Generator().manual_seed(mixed(own.initial_seed(), self.epoch))
        generator = torch.Generator().manual_seed(self.seed)
        if self.skips:
            _draw(generator)
        return generator


Watch = Callable[[int, Any], None]


def draws(
    loader: DataLoader[Any], *, seed: int, epoch: int, start: int, watch: Watch | None = None
) -> Iterator[Draw]:
    """Yield the draws of the loader's sampler in an epoch.

    Samplers of torch and of this package are sliced, so that any start costs the same. Others are
    iterated from the beginning after seeding all generators; the orders come from
    `seed_generators(seed)` followed by torch's own iterator, unless the sampler has a generator.

    Args:
        loader: A loader of a map-style dataset.
        seed: The seed of the epoch.
        epoch: The number of the epoch.
        start: How many draws to skip.
        watch: Called with the number and items of each draw of an iterated sampler, including
            skipped ones.
    """
    order_seed = OrderSeed(seed, epoch, loader.generator is None)
    batches = loader.batch_sampler
    if not is_sliced(loader):
        sampler = loader.sampler if batches is None else batches
        return replayed(sampler, order_seed, start, is_batch=batches is not None, watch=watch)
    if batches is None:
        return _singles(loader.sampler, order_seed, start)
    return _batched(batches, order_seed, start)


def order_of(loader: DataLoader[Any], *, seed: int, epoch: int) -> Order:
    """Return all indices of an epoch.

    Args:
        loader: A batched loader for which `is_sliced` is true.
        seed: The seed of the epoch.
        epoch: The number of the epoch.
    """
    sampler: Any = loader.batch_sampler.sampler  # type: ignore[union-attr]  # torch's own
    return _order_of(sampler, OrderSeed(seed, epoch, loader.generator is None))


def is_sliced(loader: DataLoader[Any]) -> bool:
    """Return whether a position can be reached without iterating the sampler."""
    batches = loader.batch_sampler
    if batches is None:
        return type(loader.sampler) in _ORDERS
    return type(batches) is BatchSampler and type(batches.sampler) in _ORDERS


def _singles(sampler: Any, order_seed: OrderSeed, start: int) -> Iterator[Draw]:
    order = _order_of(sampler, order_seed)
    for number in range(start, len(order)):
        item = order[number]
        plain = item.item() if isinstance(item, np.generic) else item
        yield Draw(number, plain, number)


def _batched(batches: Any, order_seed: OrderSeed, start: int) -> Iterator[Draw]:
    order = _order_of(batches.sampler, order_seed)
    size = batches.batch_size
    end = len(order) - (len(order) % size if batches.drop_last else 0)
    number, chunk = start, size * max(1, _CHUNK // size)
    for begin in range(start * size, end, chunk):
        part = order[begin : min(begin + chunk, end)]
        indices = part.tolist() if isinstance(part, np.ndarray) else list(part)
        for first in range(0, len(indices), size):
            yield Draw(number, indices[first : first + size], begin + first)
            number += 1


def replayed(
    sampler: Any,
    order_seed: OrderSeed,
    start: int = 0,
    *,
    is_batch: bool,
    watch: Watch | None = None,
) -> Iterator[Draw]:
    """Iterate a sampler from its beginning, and yield its draws from `start` on."""
    position = 0
    seed_generators(order_seed.seed)
    if order_seed.skips:
        _draw(torch.default_generator)
    given = iter(sampler)
    for number in count():
        if number:  # independent of random numbers drawn elsewhere in between
            seed_generators(mixed(order_seed.seed, number))
        try:
            items = next(given)
        except StopIteration:
            return
        if watch is not None:
            watch(number, items)
        if number >= start:
            yield Draw(number, items, position)
        position += len(items) if is_batch else 1


# ---- complete orders


def _order_of(sampler: Any, order_seed: OrderSeed) -> Order:
    return _ORDERS[type(sampler)](sampler, order_seed)


def _random(sampler: RandomSampler, order_seed: OrderSeed) -> Order:
    generator = order_seed.generator(sampler.generator)
    if sampler.generator is None:
        generator.manual_seed(_draw(generator))
    length, num = len(sampler.data_source), sampler.num_samples
    if sampler.replacement:
        return torch.randint(length, (num,), generator=generator).numpy()
    if not length:
        return range(0)
    rounds = [torch.randperm(length, generator=generator) for _ in range(-(-num // length))]
    return torch.cat(rounds).numpy()[:num] if len(rounds) > 1 else rounds[0].numpy()[:num]


def _subset(sampler: SubsetRandomSampler, order_seed: OrderSeed) -> Order:
    indices = sampler.indices
    order = torch.randperm(len(indices), generator=order_seed.generator(sampler.generator))
    return [indices[place] for place in order.tolist()]


def _weighted(sampler: WeightedRandomSampler, order_seed: OrderSeed) -> Order:
    return torch.multinomial(
        sampler.weights,
        sampler.num_samples,
        sampler.replacement,
        generator=order_seed.generator(sampler.generator),
    ).numpy()


def _draw(generator: torch.Generator) -> int:
    """Draw a seed as torch's iterator and its random sampler do."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


_ORDERS: Final[dict[type, Callable[[Any, OrderSeed], Order]]] = {
    SequentialSampler: lambda sampler, order_seed: range(len(sampler.data_source)),
    SeededSampler: lambda sampler, order_seed: sampler.order(order_seed.epoch),
    StreamSampler: lambda sampler, order_seed: sampler.order(order_seed.epoch),
    DistributedSampler: lambda sampler, order_seed: list(sampler),
    RandomSampler: _random,
    SubsetRandomSampler: _subset,
    WeightedRandomSampler: _weighted,
}
