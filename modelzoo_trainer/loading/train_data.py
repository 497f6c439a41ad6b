"""The data of fit() or validate(): resolve dataloader arguments and start epochs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset

from modelzoo_trainer.base.devices import Backend
from modelzoo_trainer.callback import Batch, Loader
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.batches import batch_size_of
from modelzoo_trainer.loading.dataset_info import (
    check_limit,
    facts_of,
    size_of_draws,
    warn_of_shorter_epoch,
)
from modelzoo_trainer.loading.epochs import (
    EpochIterator,
    StartedEpoch,
    exact_length,
    known_length,
    last_index,
    pin_in_thread,
    resolve_loader,
)
from modelzoo_trainer.loading.position import (
    EpochSeeds,
    EpochStart,
    LoaderState,
    Position,
    ShardLayout,
    set_epoch_of,
)
from modelzoo_trainer.loading.sharding import (
    WHOLE,
    drops_last,
    even_part,
    is_split_already,
    num_batches,
)
from modelzoo_trainer.loading.source import SequenceSource, Source
from modelzoo_trainer.loading.sources import (
    make_source,
    split_of,
    take_shard,
    until_all_end,
)
from modelzoo_trainer.loading.stream import StreamSampler, stream_sampler

log = logging.getLogger("modelzoo_trainer.data")

_TRAINING: Final = "train_dataloader"


class TrainData:
    """The training data of fit().

    Args:
        given: An iterable of batches, or a callable that returns one.
        limit: Batches per epoch, from `loop.steps_per_epoch`; None = no limit.
        backend: Has the data shard of this rank.
        name: The argument's name, for messages.

    Raises:
        ConfigError: If it is neither, or ranks cannot divide it.
    """

    def __init__(
        self, given: Loader, limit: int | None, backend: Backend, name: str = _TRAINING
    ) -> None:
        self.loader: Iterable[Batch] = resolve_loader(given, name)
        pin_in_thread(self.loader, backend)
        self.limit = limit
        self.limited_by = "loop.steps_per_epoch"
        """The setting of the limit, for messages."""
        self.is_used = False
        self.host_seed: int | None = None
        """Seed of this process's generators after a fetch; None = they are not seeded."""
        self.shard = backend.comm.data_shard
        self.keeps_state = False
        """Whether a checkpoint contains state of the loader."""
        self._exchange = backend.comm.gather_from_shards
        self._looks_ahead = backend.caps.looks_ahead
        self._name = name
        self._given = given
        self._source: Source | None = None
        if isinstance(self.loader, IterableDataset):
            log.warning(
                "%s: %s is an IterableDataset without a DataLoader, so each item is used as a "
                "batch. If the items are samples, wrap it: torch.utils.data.DataLoader(dataset, "
                "batch_size=...).",
                name,
                type(self.loader).__name__,
            )
        self._split = split_of(self.loader, self.shard, name)
        take_shard(self.loader, self.shard)
        if self._split is None and type(self.loader) is DataLoader:
            self._warn_of_own_sampler(self.loader)
        if name == _TRAINING and self.stream is not None:
            _log_rest(self.stream)

    @property
    def divides_itself(self) -> bool:
        """Whether each rank's loader yields its own part of the data, as far as known."""
        is_sampler = type(self.loader) is DataLoader and is_split_already(self.loader)
        return self._split is None and not is_sampler  # the constructor has warned about that

    def _warn_of_own_sampler(self, loader: DataLoader[Any]) -> None:
        if is_split_already(loader):
            log.warning(
                "%s has a sampler that shards the data over ranks. Resumed in the middle of an "
                "epoch with another number of processes, the run would repeat some samples and "
                "skip others. Remove the sampler: the trainer shards the data.",
                self._name,
            )

    @property
    def stream(self) -> StreamSampler | None:
        """The loader's sampler if its epochs follow each other in one stream."""
        return stream_sampler(self.loader)

    def layout(self) -> ShardLayout:
        """Return the meaning of batch numbers."""
        num = self.shard[1]
        return ShardLayout(
            num_shards=num,
            per_batch=num if self._split is None else self._split.per_batch,
            size=size_of_draws(self.loader),
            samples_per_epoch=None if self.stream is None else self.stream.samples_per_epoch,
        )

    def length(self, first: int = 0) -> int | None:
        """Return the number of batches of an epoch if exact, else None.

        `first`: draws of the loader before batch 0.
        """
        num = None if self._split is None else exact_length(self.loader)
        return self._num_batches(num, first)

    def num_batches(self) -> int | None:
        """Return the number of batches of an epoch, if known."""
        return self._num_batches(known_length(self.loader), 0)

    def _num_batches(self, num_draws: int | None, first: int) -> int | None:
        if num_draws is None or self._split is None:
            return num_draws
        return num_batches(num_draws, self._split, drops=drops_last(self.loader), first=first)

    def samples_per_batch(self) -> int | None:
        """Return the samples per batch over all ranks, if known."""
        size = size_of_draws(self.loader)
        if size is None and isinstance(self.loader, (list, tuple)) and self.loader:
            with suppress(ConfigError):  # a batch that does not tell
                size = batch_size_of(self.loader[0])
        return None if size is None else size * self.layout().per_batch

    def facts(self) -> dict[str, int]:
        """Return the sizes of the data over all ranks."""
        found = facts_of(self.loader, self.num_batches(), self.layout().per_batch)
        if self._source is not None and self._source.draws:
            found["num_workers"] = self.loader.num_workers  # type: ignore[attr-defined]  # a loader's
        return found

    def begin(
        self,
        position: Position,
        seeds: EpochSeeds,
        skipped: frozenset[int] = frozenset(),
        *,
        restores: bool = False,
        needs_sizes: bool = False,
    ) -> StartedEpoch:
        """Start an epoch.

        Args:
            position: Where to start.
            seeds: Its seeds.
            skipped: Numbers of batches to skip.
            restores: Whether the position was loaded; if not, the epoch follows the previous one.
            needs_sizes: Whether each rank's exact number of samples is required.

        Raises:
            ConfigError: If its limit has been reached before, or it cannot start there.
        """
        source = self._source_of_epoch(position, restores=restores)
        if self._name == _TRAINING:
            set_epoch_of(self.loader, position.epoch)
        first = position.layout.first
        length = self.length(first)
        check_limit(position.batch_idx, self.limit, self.limited_by)
        if length and length <= position.batch_idx:
            warn_of_shorter_epoch(position, length)
            return StartedEpoch(items=iter(()), position=position.batch_idx)
        own = self._even_part(first)
        if own is not None:
            source = SequenceSource(own, WHOLE, self._name)
        is_own = self._split is None  # count its batches, not the draws of all ranks
        start = EpochStart(
            epoch=position.epoch,
            batch_idx=position.batch_idx,
            seeds=seeds,
            skipped=skipped,
            num_before=self._num_before(position.epoch) if restores else 0,
            restores=restores,
            loader_state=position.loader,
            offset=position.batch_idx if is_own or own is not None else position.offset,
            length=length,
            limit=self.limit,
            needs_sizes=needs_sizes,
            needs_state=self._name == _TRAINING,
        )
        marked = None if is_own else source.begin_marked(start)
        items = iter(()) if marked is not None else source.begin(start)
        if is_own:
            items = until_all_end(items, source, start, self.shard[1], self._exchange)
        is_ahead = source.seeds_ahead or self._looks_ahead or needs_sizes
        self.host_seed = seeds.fetches if source.seeds_host and is_ahead else None
        self.keeps_state = source.keeps_state
        self.is_used = True
        return StartedEpoch(
            items=items,
            length=None if source.reads_to_end else length,
            position=position.batch_idx,
            parts=position.parts,
            skipped=skipped,
            is_sharded=self.shard[1] > 1 and own is None,
            marked=marked,
            close=self.close,
        )

    def _even_part(self, first: int) -> list[Batch] | None:
        if self._split is None or self._split.count == 1:
            return None
        return even_part(self.loader, self._split, first)

    def _source_of_epoch(self, position: Position, *, restores: bool) -> Source:
        if self.is_used and isinstance(self.loader, Iterator):
            if self._given is not self.loader:
                self.loader = resolve_loader(self._given, self._name)
                self.close()
                self._source = None
                self._split = split_of(self.loader, self.shard, self._name)
            elif restores and type(self._source) is Source:
                raise ConfigError(
                    f"The run continues with batch {position.batch_idx} of epoch "
                    f"{position.epoch + 1}, but train_dataloader is an iterator that has already "
                    f"yielded it. Pass a function that creates the iterator."
                )
        if self._source is None:
            self._source = make_source(self.loader, self._split, self._exchange, self._name)
        return self._source

    def _num_before(self, epoch: int) -> int:
        """Return how many batches earlier epochs have taken from a shared iterator."""
        is_shared = isinstance(self.loader, Iterator) and self._given is self.loader
        return epoch * (self.limit or 0) if is_shared else 0

    def state(self, position: int | None) -> LoaderState | None:
        """Return the loader's state after `position` batches; None = after a whole epoch."""
        return None if self._source is None else self._source.state(position)

    def forget_before(self, position: int) -> None:
        """Drop states of earlier positions."""
        if self._source is not None:
            self._source.forget_before(position)

    def end(self, first: int = 0) -> int | None:
        """Return the number of batches at which an epoch ends, if known."""
        ends = [end for end in (self.length(first), self.limit) if end is not None]
        return min(ends, default=None)

    def likely_end(self, first: int = 0) -> int | None:
        """Return the number of batches at which an epoch ends, if known, even if not exact."""
        num = self._num_batches(known_length(self.loader), first)
        return min((one for one in (num, self.limit) if one is not None), default=None)

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader the number of the epoch, on which its length may depend."""
        set_epoch_of(self.loader, epoch)

    def has_nothing_left(self, position: int, skipped: frozenset[int], first: int = 0) -> bool:
        """Return whether the rest of an epoch is skipped, as far as its length is known."""
        end = self.end(first)
        if end is None or position >= end:
            return False
        return last_index(position, end, skipped) is None

    def explain_empty(self, num_batches: int) -> str:
        """Return an error text for an empty epoch after `num_batches` forward passes."""
        if num_batches and self._given is self.loader and exact_length(self.loader) is None:
            return (
                f"train_dataloader yielded {num_batches} batches and cannot be iterated again. "
                f"Pass a callable that creates it for each epoch."
            )
        return (
            "train_dataloader yields no batch. Check the data, the split, and whether drop_last "
            "with this batch_size drops all samples."
        )

    def close(self) -> None:
        """End the epoch and shut down its workers."""
        if self._source is not None:
            self._source.close()


def _log_rest(stream: StreamSampler) -> None:
    """Log that an epoch of training is shorter than one of the data, or longer."""
    num, whole = stream.samples_per_epoch, stream.num_samples
    if num != whole:
        log.info(
            "%s: an epoch is %d batches of %d, so %d samples; the data have %d. Epochs follow each "
            "other without a gap: what is left of the data comes first in the next epoch.",
            _TRAINING,
            stream.num_batches,
            stream.batch_size,
            num,
            whole,
        )


def validation_batches(
    loader: Iterable[Batch],
    backend: Backend,
    number: int,
    micro_batch_size: int | None,
    limit: int | None,
    name: str = "val_dataloader",
) -> EpochIterator:
    """Return the batches of a validation on this rank.

    Args:
        loader: The dataloader. With a `StreamSampler`, epoch 0 of it.
        backend: Has the data shard of this rank.
        number: Seed of a random order; equal on all ranks.
        micro_batch_size: Samples per micro-batch; None = no splitting.
        limit: Maximum number of batches; None = no limit.
        name: The argument's name, for messages.

    Raises:
        ConfigError: If ranks cannot divide it.
    """
    pin_in_thread(loader, backend)
    begun: Iterable[Batch] | StartedEpoch = loader
    if stream_sampler(loader) is not None:  # the same rows at any step, with any number of ranks
        number = 0
        set_epoch_of(loader, number)
    if backend.comm.data_shard[1] > 1:
        data = TrainData(loader, limit, backend, name)
        seeds = EpochSeeds.of(backend, number).of_validation()
        position = Position(epoch=number, layout=data.layout())
        begun = data.begin(position, seeds, needs_sizes=micro_batch_size is not None)
    return EpochIterator(begun, backend.batches, limit=limit, micro_batch_size=micro_batch_size)


def num_validation_batches(loader: Loader, backend: Backend, limit: int | None) -> int | None:
    """Return the number of batches of a validation over all ranks; None = not known.

    `limit`: maximum number of batches; None = no limit.

    Raises:
        ConfigError: If ranks cannot divide the dataloader.
    """
    num = known_length(loader)
    shard = backend.comm.data_shard
    split = None if num is None or shard[1] == 1 else split_of(loader, shard, "val_dataloader")
    if num is not None and split is not None:
        num = num_batches(num, split, drops=drops_last(loader))
    return min((one for one in (num, limit) if one is not None), default=None)


def explain_empty_validation(name: str) -> str:
    """Return the message for a validation dataloader without batches."""
    return (
        f"{name} yields no batch. Check the data and the split; if it can be iterated only once, "
        f"pass a callable that creates it."
    )
