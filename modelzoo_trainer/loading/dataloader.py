"""A torch DataLoader that can begin anywhere in an epoch, and whose samples are reproducible."""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from modelzoo_trainer.loading.per_sample import (
    Indices,
    SeededDataset,
    collates_plainly,
    draws_nothing,
    mixed,
)
from modelzoo_trainer.loading.position import EpochStart
from modelzoo_trainer.loading.sample_order import Draw, is_sliced
from modelzoo_trainer.loading.sharding import WHOLE, Split, shard_draws
from modelzoo_trainer.loading.workers import shut_down, start_iterator

log = logging.getLogger("modelzoo_trainer.data.positioned")

_MOST_SHOWN: Final = 64  # indices in a line of the log


def can_be_positioned(loader: Any) -> bool:
    """Return whether a loader is torch's own, over a data set whose samples have indices."""
    return type(loader) is DataLoader and not isinstance(
        loader.dataset, (IterableDataset, MapDataPipe)
    )


class PositionedLoader:
    """Loads what a loader loads, in an order that seed, epoch and position alone decide.

    It is a loader of its own with the options of the given one, whose data set, collation, workers
    and sampler it uses. Samples are loaded with python's, numpy's and torch's generators seeded by
    epoch and index (`SeededDataset`), unless they are known to need none.

    `seeds_host` says whether a fetch, or the sampler, seeds the generators of this process.

    Args:
        loader: One for which `can_be_positioned` holds.
        split: How processes divide what it draws.

    Cost:
        The order of an epoch: eight bytes a sample of a shuffled data set, at any position. About
        10 us a sample where they are seeded, in whichever process loads it.
    """

    def __init__(self, loader: DataLoader[Any], split: Split = WHOLE) -> None:
        is_quiet = draws_nothing(loader.dataset)
        self._given = loader
        self._split = split
        self._seeded: SeededDataset | None = None
        if not (is_quiet and collates_plainly(loader.collate_fn)) or hasattr(
            loader.dataset, "set_epoch"
        ):
            self._seeded = SeededDataset(loader.dataset, each=not is_quiet)
        self.seeds_host = self._seeded is not None or not is_sliced(loader)
        self._feed = _Feed()
        self._generator = torch.Generator()
        self._own = self._make(loader)
        self._iterator: Iterator[Any] | None = None

    def _make(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        if loader.batch_sampler is None:
            feed: dict[str, Any] = {"batch_size": None, "sampler": self._feed}
        else:
            feed = {"batch_sampler": self._feed}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of too many workers: the given one has warned
            return DataLoader(
                self._seeded or loader.dataset,
                **feed,
                num_workers=loader.num_workers,
                collate_fn=loader.collate_fn,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                worker_init_fn=loader.worker_init_fn,
                multiprocessing_context=loader.multiprocessing_context,
                generator=self._generator,
                prefetch_factor=loader.prefetch_factor,
                persistent_workers=loader.persistent_workers,
                pin_memory_device=loader.pin_memory_device,
                in_order=loader.in_order,
            )

    def begin(self, start: EpochStart) -> Iterator[tuple[Draw, Any]]:
        """Return an iterator over this process's part of an epoch: what was drawn, and the batches.

        What is skipped is not loaded.
        """
        if not self._own.persistent_workers:
            self.close()
        epoch, seeds, split = start.epoch, start.seeds, self._split
        first = start.batch_idx, start.offset(split.per_batch)
        found = shard_draws(self._given, split, first, seed=seeds.order, epoch=epoch)
        loading: deque[Draw] = deque()
        kept = _kept(found, start, loading)
        own = self._given.generator
        own_seed = None if own is None else mixed(own.initial_seed(), epoch)
        self._generator.manual_seed(seeds.order if own_seed is None else own_seed)
        if self._seeded is None:
            self._feed.items = (draw.items for draw in kept)
        else:
            self._seeded.epoch = epoch  # set_epoch of the data set was called in this process
            self._feed.items = (
                Indices(draw.items, seeds.samples, epoch, draw.position) for draw in kept
            )
        self._iterator = start_iterator(self._own)
        return ((loading.popleft(), batch) for batch in self._iterator)

    def close(self) -> None:
        """End the workers."""
        iterator, self._iterator = self._iterator, None
        self._own._iterator = None
        shut_down(iterator)


class _Feed:
    """A sampler whose next epoch is put in from outside."""

    def __init__(self) -> None:
        self.items: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.items


def _kept(found: Iterator[Draw], start: EpochStart, loading: deque[Draw]) -> Iterator[Draw]:
    """Yield what is to be loaded, and note it."""
    for draw in found:
        if draw.number in start.skipped:
            log_skipped(start.epoch, draw.number, draw.items)
            continue
        loading.append(draw)
        yield draw


def log_skipped(epoch: int, number: int, items: Any = None) -> None:
    """Log which batch of an epoch is skipped, and the indices of its samples if they are known."""
    indices = items if isinstance(items, (list, tuple)) else [items]
    shown = ", ".join(map(str, indices[:_MOST_SHOWN]))
    more = f" and {len(indices) - _MOST_SHOWN} more" if len(indices) > _MOST_SHOWN else ""
    which = "" if items is None else f"; its samples: {shown}{more}"
    log.info("Epoch %d: batch %d is skipped%s.", epoch, number, which)
