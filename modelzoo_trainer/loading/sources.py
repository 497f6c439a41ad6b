"""Find the kind of a loader, and how ranks divide its batches."""

from __future__ import annotations

from itertools import count
from typing import Any, Final

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from modelzoo_trainer.callback import Batch
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.attribute_values import has_state
from modelzoo_trainer.loading.batch_seeds import collates_plainly
from modelzoo_trainer.loading.dataloader import PositionedSource, can_be_positioned
from modelzoo_trainer.loading.position import EpochStart
from modelzoo_trainer.loading.sharded_stream import ShardedStream
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


# ---- kinds of loaders


def keeps_own_state(loader: Any) -> bool:
    """Return whether a loader's own `state_dict` is used, because how it loads is not known."""
    return has_state(loader) and not can_be_positioned(loader) and not is_stream(loader)


def split_of(loader: Any, shard: tuple[int, int], name: str) -> Split | None:
    """Return how ranks divide a loader; None = each rank has its own.

    `shard`: (index of the data shard of this rank, number of shards).

    Raises:
        ConfigError: If its batches are for all ranks but cannot be divided.
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
            f"{name} ({type(loader).__name__}) has is_global_batch set, but its batches cannot be "
            f"divided among {shard[1]} processes. That requires a torch DataLoader over a "
            f"map-style dataset without a DistributedSampler, or over a ShardedStream. Remove "
            f"is_global_batch."
        )
    return None


def take_shard(loader: Any, shard: tuple[int, int]) -> None:
    """Tell a dataset that divides itself which part this rank has: `take_shard(index, count)`.

    `shard`: (index of the data shard of this rank, number of shards).
    """
    take = getattr(getattr(loader, "dataset", None), "take_shard", None)
    if take is not None:
        take(*shard)


def _check_global(size: int | None, num: int, name: str) -> None:
    if size is None or not size % num:
        return
    lower = size - size % num
    fits = f"{lower} or {lower + num}" if lower else f"{num}"
    raise ConfigError(
        f"{name}: a batch size of {size} over all processes is not divisible by {num} processes. "
        f"Use {fits}, or another number of processes."
    )


def make_source(loader: Any, split: Split | None, exchange: Exchange, name: str) -> Source:
    """Create the source of a loader's batches.

    `split`: the result of `split_of`; `exchange` gathers a number from all ranks.
    """
    if isinstance(loader, (list, tuple)):
        return SequenceSource(loader, split or WHOLE, name)
    if can_be_positioned(loader):
        return PositionedSource(loader, split or WHOLE, exchange, name)
    if is_stream(loader):
        return StreamSource(loader, split, name)
    return StatefulSource(loader, name) if has_state(loader) else Source(loader, name)


# ---- loaders that belong to one rank


def until_all_end(
    items: NumberedBatches, source: Source, start: EpochStart, num_shards: int, exchange: Exchange
) -> NumberedBatches:
    """Yield a source's batches until the sources of all ranks have ended.

    A rank that ends earlier repeats its last batch as a padding batch. Ranks exchange a number for
    each batch, unless their samplers give each the same number of samples.

    Args:
        items: The source's started epoch.
        source: This rank's source.
        start: The start of the epoch.
        num_shards: Number of ranks.
        exchange: Gathers a number from all ranks. Collective.

    Raises:
        ConfigError: If some ranks have no batch at all and others have.
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
    """Return whether torch's sampler gives each rank the same number of samples and batches."""
    batches = loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    is_divided = type(sampler) is DistributedSampler and sampler.num_replicas == num_shards
    return is_divided and collates_plainly(loader.collate_fn)


def _no_batch(loader: Any, sizes: list[int]) -> ConfigError:
    empty = ", ".join(str(idx) for idx, size in enumerate(sizes) if size == _NEVER_BEGUN)
    return ConfigError(
        f"the dataloader ({type(loader).__name__}) yields no batch for data shard {empty} of "
        f"{len(sizes)}, but does for others. Give each process at least one "
        f"batch per epoch."
    )
