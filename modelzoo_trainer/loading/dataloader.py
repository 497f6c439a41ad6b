"""A torch DataLoader that can begin anywhere in a pass, and whose samples are reproducible."""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any, Final, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from modelzoo_trainer.loading.per_sample import (
    Indices,
    SeededDataset,
    collates_plainly,
    draws_nothing,
    mixed,
)
from modelzoo_trainer.loading.sample_order import Draw, draws, is_sliced
from modelzoo_trainer.loading.shard_layout import Share, Split, shares
from modelzoo_trainer.loading.workers import shut_down, start_iterator

log = logging.getLogger("modelzoo_trainer.data.positioned")

Given = TypeVar("Given", Draw, Share)

_MOST_SHOWN: Final = 64  # indices in a line of the log


def can_be_positioned(loader: Any) -> bool:
    """Return whether a loader is torch's own, over a data set whose samples have indices."""
    return type(loader) is DataLoader and not isinstance(
        loader.dataset, (IterableDataset, MapDataPipe)
    )


class PositionedLoader:
    """Loads what a loader loads, in an order that seed, pass and position alone decide.

    It is a loader of its own with the options of the given one, whose data set, collation, workers
    and sampler it uses. Samples are loaded with python's, numpy's and torch's generators seeded by
    pass and index (`SeededDataset`), unless they are known to need none.

    `seeds_host` says whether a fetch, or the sampler, seeds the generators of this process.

    Args:
        loader: One for which `can_be_positioned` holds.

    Cost:
        The order of a pass: eight bytes a sample of a shuffled data set, at any position. About
        10 us a sample where they are seeded, in whichever process loads it.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        is_quiet = draws_nothing(loader.dataset)
        self._given = loader
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

    def begin(
        self, *, epoch: int, start: int, seeds: tuple[int, int], passed_over: Collection[int] = ()
    ) -> Iterator[tuple[int, Any]]:
        """Return an iterator over a pass: the numbers of batches and the batches.

        Args:
            epoch: The number of the pass.
            start: How many batches to leave out, without loading them.
            seeds: Of the order, and of the samples.
            passed_over: Numbers of other batches to leave out.
        """
        if not self._own.persistent_workers:
            self.close()
        taken: deque[Draw] = deque()
        found = draws(self._given, seed=seeds[0], epoch=epoch, start=start)
        return _numbered(self._load(_kept(found, epoch, passed_over, taken), epoch, seeds), taken)

    def begin_share(
        self,
        split: Split,
        place: tuple[int, int],
        *,
        epoch: int,
        seeds: tuple[int, int],
        passed_over: Collection[int] = (),
    ) -> Iterator[tuple[Share, Any]]:
        """Return an iterator over this process's part of a pass, and what each batch is.

        Args:
            split: How the processes divide the draws.
            place: The number of the first batch, and how many draws to leave out.
            epoch: The number of the pass.
            seeds: Of the order, and of the samples; equal on all processes.
            passed_over: Numbers of batches to leave out.
        """
        if not self._own.persistent_workers:
            self.close()
        taken: deque[Share] = deque()
        found = shares(self._given, split, place, seed=seeds[0], epoch=epoch)
        loaded = self._load(_kept(found, epoch, passed_over, taken), epoch, seeds)
        return ((taken.popleft(), batch) for batch in loaded)

    def _load(
        self, kept: Iterator[Draw] | Iterator[Share], epoch: int, seeds: tuple[int, int]
    ) -> Iterator[Any]:
        order_seed, sample_seed = seeds
        if self._seeded is not None:
            self._seeded.epoch = epoch  # here the data set has been told
        own = self._given.generator
        self._generator.manual_seed(order_seed if own is None else mixed(own.initial_seed(), epoch))
        if self._seeded is not None:
            self._feed.items = (Indices(d.items, sample_seed, epoch, d.position) for d in kept)
        else:
            self._feed.items = (d.items for d in kept)
        self._iterator = start_iterator(self._own)
        return self._iterator

    def close(self) -> None:
        """End the workers."""
        iterator, self._iterator = self._iterator, None
        self._own._iterator = None
        shut_down(iterator)


class _Feed:
    """A sampler whose next pass is put in from outside."""

    def __init__(self) -> None:
        self.items: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.items


def _kept(
    found: Iterator[Given], epoch: int, passed_over: Collection[int], taken: deque[Given]
) -> Iterator[Given]:
    """Yield what is to be loaded, and note it."""
    for draw in found:
        if draw.number in passed_over:
            log_skipped(epoch, draw.number, draw.items)
            continue
        taken.append(draw)
        yield draw


def log_skipped(epoch: int, number: int, items: Any = None) -> None:
    """Say which batch is left out.

    Args:
        epoch: The number of its pass.
        number: Its number in the pass.
        items: The indices of its samples; None = they are not known.
    """
    indices = items if isinstance(items, (list, tuple)) else [items]
    shown = ", ".join(map(str, indices[:_MOST_SHOWN]))
    more = f" and {len(indices) - _MOST_SHOWN} more" if len(indices) > _MOST_SHOWN else ""
    which = "" if items is None else f"; its samples: {shown}{more}"
    log.info("Pass %d: batch %d is passed over%s.", epoch, number, which)


def _numbered(iterator: Iterator[Any], taken: deque[Draw]) -> Iterator[tuple[int, Any]]:
    for batch in iterator:
        yield taken.popleft()[0], batch
