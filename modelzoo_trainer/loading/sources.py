"""Which kind a loader is, and how its batches are divided among any number of processes."""

from __future__ import annotations

from itertools import count
from typing import Any, Final

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from modelzoo_trainer.callback import Batch
from modelzoo_trainer.data.sharded_stream import ShardedStream
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.batch_seeds import collates_plainly
from modelzoo_trainer.loading.dataloader import PositionedSource, can_be_positioned
from modelzoo_trainer.loading.hidden_state import has_state
from modelzoo_trainer.loading.position import EpochStart
from modelzoo_trainer.loading.sharding import (
    WHOLE,
    ShardedBatch,
    ShardInfo,
    Split,
    is_split_already,
    size_of,
)
from modelzoo_trainer.loading.source import (
    Exchange,
    NumberedBatches,
    SequenceSource,
    Source,
    StatefulSource,
)
from modelzoo_trainer.loading.streams import StreamSource, is_stream

_ENDED: Final = -1
_NEVER_BEGUN: Final = -2


# ---- which kind a loader is


def keeps_own_state(loader: Any) -> bool:
    """Return whether a loader is asked for its state, as it is not known how it loads."""
    return has_state(loader) and not can_be_positioned(loader) and not is_stream(loader)


def split_of(loader: Any, shard: tuple[int, int], name: str) -> Split | None:
    """Return how processes divide a loader; None = each process's loader is its own.

    `shard` is which part of the data this process reads, and of how many.

    Raises:
        ConfigError: If its batches are for all processes, but cannot be divided by them.
    """
    if shard[1] == 1:
        return WHOLE
    is_global = getattr(loader, "is_global_batch", False) is True
    if not keeps_own_state(loader):
        if isinstance(loader, (list, tuple)):
            return Split(*shard)
        is_divided = is_stream(loader) and isinstance(loader.dataset, ShardedStream)
        if is_divided or (can_be_positioned(loader) and not is_split_already(loader)):
            if is_global:
                _check_global(loader.batch_size, shard[1], name)
            return Split(*shard, is_global=is_global)
    if is_global:
        raise ConfigError(
            f"{name} ({type(loader).__name__}) has is_global_batch set, but {shard[1]} processes "
            f"cannot divide its batches: that requires a torch DataLoader over a data set with "
            f"indices, without a DistributedSampler, or over a ShardedStream. Leave "
            f"is_global_batch out."
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


def make_source(loader: Any, split: Split | None, exchange: Exchange, name: str) -> Source:
    """Return where the batches of a loader come from.

    `split` is what `split_of` returned for it; `exchange` returns the numbers of all processes.
    """
    if isinstance(loader, (list, tuple)):
        return SequenceSource(loader, split or WHOLE, name)
    if can_be_positioned(loader):
        return PositionedSource(loader, split or WHOLE, exchange, name)
    if is_stream(loader):
        return StreamSource(loader, split, name)
    return StatefulSource(loader, name) if has_state(loader) else Source(loader, name)


# ---- loaders of which each process has its own


def until_all_end(
    items: NumberedBatches, source: Source, start: EpochStart, num_shards: int, exchange: Exchange
) -> NumberedBatches:
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
