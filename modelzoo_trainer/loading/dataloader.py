"""A torch DataLoader that can start anywhere in an epoch, with reproducible samples."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe
from typing_extensions import override

from modelzoo_trainer.errors import not_an_end
from modelzoo_trainer.loading.attribute_values import has_state
from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.loading.batch_seeds import (
    SeededDataset,
    collates_plainly,
    draws_nothing,
    mixed,
)
from modelzoo_trainer.loading.dataset_state import (
    COLLATE,
    Collation,
    DatasetObserver,
    Notes,
    Rounds,
    warn_of_change,
)
from modelzoo_trainer.loading.epochs import last_index
from modelzoo_trainer.loading.position import EpochStart, LoaderState
from modelzoo_trainer.loading.sample_order import Draw, is_sliced
from modelzoo_trainer.loading.sampler_state import SamplerState
from modelzoo_trainer.loading.sharding import (
    WHOLE,
    ShardedBatch,
    ShardInfo,
    Split,
    shard_draws,
    size_of,
)
from modelzoo_trainer.loading.source import (
    Exchange,
    MarkedBatches,
    NumberedBatches,
    Source,
    log_skipped,
    place_of,
)
from modelzoo_trainer.loading.workers import WorkerIterator, shut_down, start_iterator

log = logging.getLogger("modelzoo_trainer.data")

_OF_TORCHDATA: Final = ("torchdata.stateful_dataloader.stateful_dataloader", "StatefulDataLoader")


def can_be_positioned(loader: Any) -> bool:
    """Return whether a loader is torch's own, over a map-style dataset."""
    return is_plain(loader) and not isinstance(loader.dataset, (IterableDataset, MapDataPipe))


def is_plain(loader: Any) -> bool:
    """Return whether a loader's options describe its behaviour: it is torch's or torchdata's."""
    kind = type(loader)
    return kind is DataLoader or (kind.__module__, kind.__name__) == _OF_TORCHDATA


class PositionedLoader:
    """Load the batches of a loader in an order that only depends on seed, epoch and position.

    This is a separate loader with the options, dataset, collate function, workers and sampler of
    the given one. Python's, NumPy's and torch's generators are seeded by epoch and position
    (`SeededDataset`) for each batch, unless it is known to use no random numbers.

    `seeds_host`: whether loading, or the sampler, seeds the generators of this process.
    `seeds_ahead`: whether it does so before earlier batches are trained on. `last`: the number of
    the epoch's last batch, once its indices are known.

    Args:
        loader: A loader for which `can_be_positioned` is true.
        split: How ranks divide its draws.
        name: The argument's name, for messages.

    Cost:
        The order of an epoch: eight bytes per sample of a shuffled dataset, at any position. About
        8 us per batch where generators are seeded. For a dataset with `state_dict`, that call and
        a copy of its result per batch.
    """

    def __init__(
        self, loader: DataLoader[Any], split: Split = WHOLE, name: str = "train_dataloader"
    ) -> None:
        dataset: Any = loader.dataset
        self._given = loader
        self._split = split
        self._name = name
        self._keeps_state = has_state(dataset)
        self._first_state = copy.deepcopy(dataset.state_dict()) if self._keeps_state else None
        self._rounds = Rounds(loader.num_workers)
        self._notes: Notes | None = None
        self._observer: DatasetObserver | None = None
        self._seeded: SeededDataset | None = None
        self.draws = draws = not (draws_nothing(dataset) and collates_plainly(loader.collate_fn))
        if self._keeps_state:
            self._observer = DatasetObserver({}, stateful=dataset)
        elif draws:
            self._notes = Notes(loader.num_workers)
            owners = {"": dataset, COLLATE: loader.collate_fn}
            self._observer = DatasetObserver(owners, notes=self._notes)
        if draws or self._keeps_state or hasattr(dataset, "set_epoch"):
            self._seeded = SeededDataset(dataset, self._observer)
        self._sampler = None if is_sliced(loader) else SamplerState(loader, name)
        loads_here = self._seeded is not None and not loader.num_workers
        self.seeds_host = loads_here or self._sampler is not None
        self.seeds_ahead = self._sampler is not None and loader.num_workers > 0
        self.last: int | None = None
        self.draw: Draw
        self.keeps_state = self._keeps_state or self._sampler is not None
        self._feed = _Feed()
        self._generator = torch.Generator()
        self._own = self._make(loader)
        self._iterator: WorkerIterator | None = None
        self._loading: deque[Draw] = deque()
        self._num_drawn = 0
        self._num_draws_before = 0

    def _make(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        if loader.batch_sampler is None:
            feed: dict[str, Any] = {"batch_size": None, "sampler": self._feed}
        else:
            feed = {"batch_sampler": self._feed}
        collate: Any = loader.collate_fn
        if self._observer is not None:
            collate = Collation(collate, self._observer, reports=self._keeps_state)
        dataset = self._seeded or loader.dataset
        return with_options_of(loader, dataset, self._generator, collate, feed)

    def begin(self, start: EpochStart) -> MarkedBatches:
        """Return an iterator over this rank's part of an epoch.

        It yields (batch, is it the last, number); `draw` is the draw of the current batch.

        Skipped batches are not loaded.
        """
        if start.restores or not self._own.persistent_workers:
            self.close()
        epoch, seeds, split = start.epoch, start.seeds, self._split
        first = start.batch_idx
        if self._observer is not None and self._keeps_state:
            first = self._begin_rounds(start, self._observer)
        offset = start.offset - (start.batch_idx - first) * split.per_batch
        self._num_draws_before = offset - first * split.per_batch
        watch = None
        if self._sampler is not None:
            self._sampler.begin(start, offset)
            watch = self._sampler.watch
        found = shard_draws(
            self._given, split, (first, offset), seed=seeds.order, epoch=epoch, watch=watch
        )
        self._loading, self.last, self._num_drawn = deque(), None, first
        own = self._given.generator
        own_seed = None if own is None else mixed(own.initial_seed(), epoch)
        self._generator.manual_seed(seeds.order if own_seed is None else own_seed)
        if self._seeded is not None:
            self._seeded.epoch = epoch  # set_epoch of the dataset was called in this process
        self._feed.items = self._fed(found, start)
        self._iterator = start_iterator(self._own)
        return self._received(self._iterator, start)

    def _begin_rounds(self, start: EpochStart, observer: DatasetObserver) -> int:
        """Restore the states of workers and return the number of their first batch."""
        num = max(1, self._own.num_workers)
        first, states = start.batch_idx, None
        if start.restores:
            found = (start.loader_state or {}).get("rounds")
            saved = None if found is None else found["states"]
            if found is not None and (saved is None or len(saved) == num):
                first = found["batch_idx"]
            elif saved is not None:
                warn_of_num_workers(self._name, len(saved), num)
                saved = None
            states = [self._first_state if one is None else one for one in saved or [None] * num]
        elif self._own.persistent_workers or not self._own.num_workers:
            states = self._rounds.at_end()["states"]  # unchanged
        self._rounds.begin(first, states)
        observer.states = states if start.restores else None
        observer.is_due = True
        return first

    def _fed(self, found: Iterator[Draw], start: EpochStart) -> Iterator[Any]:
        """Yield the indices to load, and find out which draw is the last one.

        Reads one draw ahead where the last one may be known; else draws only when a batch is due,
        as torch's loader does. Never draws beyond the limit.
        """
        ends = [end for end in (start.length, start.limit) if end is not None]
        last = last_index(start.batch_idx, min(ends), start.skipped) if ends else None
        note, epoch, seed = self._loading.append, start.epoch, start.seeds.samples
        is_seeded = self._seeded is not None
        kept = found
        if start.skipped or start.limit is not None:
            kept = self._kept(found, start)
        draw = next(kept, None)
        while draw is not None:
            number, items, position, _, _ = draw
            self._num_drawn = number + 1
            may_be_last = last is None or number >= last
            following = next(kept, None) if may_be_last else None
            if may_be_last and following is None:
                self.last = number
                self._check_length(start, is_over=True)
            elif following is not None and following.number == start.length:
                self._check_length(start, is_over=False)
            note(draw)
            yield (items, seed, position, epoch) if is_seeded else items
            draw = following if may_be_last else next(kept, None)
        if self.last is None:
            self._check_length(start, is_over=True)

    def _kept(self, found: Iterator[Draw], start: EpochStart) -> Iterator[Draw]:
        """Yield the draws up to the limit without skipped batches."""
        for draw in found:
            self._num_drawn = draw.number + 1
            if draw.number not in start.skipped:
                yield draw
            else:
                log_skipped(start.epoch, draw.number, draw.items)
            if draw.number + 1 == start.limit:
                return

    def _check_length(self, start: EpochStart, *, is_over: bool) -> None:
        """Warn if the number of batches of the epoch differs from the loader's length."""
        num, length = self._num_drawn, start.length
        if length is None or (is_over and (num >= length or num == start.limit)):
            return
        log.warning(
            "%s yielded %s batches in epoch %d, but its length is %d, from which the length of "
            "the run is estimated. Correct __len__ of its sampler or batch sampler.",
            self._name,
            num if is_over else f"more than {length}",
            start.epoch + 1,
            length,
        )

    def _received(self, iterator: WorkerIterator, start: EpochStart) -> MarkedBatches:
        loading, keeps_state = self._loading, self._keeps_state
        fetch = iterator.next_function()
        while True:
            try:
                batch = fetch()
            except StopIteration as end:
                self._check_end(end, start.epoch)
                return
            except Exception as error:
                error.add_note(self._place(start.epoch))
                raise
            if self._notes is not None:
                self._warn_of_change(self._notes)
            self.draw = loading.popleft()
            number = self.draw.number
            if keeps_state:
                batch, worker, state, _ = batch
                if start.needs_state:
                    self._rounds.add(number + 1, worker, state)
                if number < start.batch_idx:
                    continue
            yield batch, number == self.last, number

    def _warn_of_change(self, notes: Notes) -> None:
        names = notes.read()
        if names or notes.is_final:
            self._notes = None
        if names:
            warn_of_change(self._given, names, self._name)

    def _check_end(self, end: StopIteration, epoch: int) -> None:
        """Raise an error for the end of an epoch that has batches left: user code raised it."""
        if self._loading:
            error = not_an_end(end, "code that loads batches")
            error.add_note(self._place(epoch))
            raise error from end

    def _place(self, epoch: int) -> str:
        if self._loading:
            draw = self._loading[0]
            return place_of(self._name, epoch, draw.number, draw.items)
        return (
            f"raised by the sampler of {self._name}, in epoch {epoch + 1} for batch "
            f"{self._num_drawn}"
        )

    def state(self, position: int | None) -> LoaderState | None:
        """Return the checkpoint state after `position` batches; None = after a whole epoch."""
        found: LoaderState = {}
        if self._sampler is not None:
            found.update(self._sampler.state(None if position is None else self._draws(position)))
        if self._keeps_state and position is not None:
            found["rounds"] = self._rounds.at(position)
        elif self._keeps_state and (self._own.persistent_workers or not self._own.num_workers):
            found["rounds"] = self._rounds.at_end()
        return found or None

    def _draws(self, position: int) -> int:
        return self._num_draws_before + position * self._split.per_batch

    def forget_before(self, position: int) -> None:
        """Drop states of earlier positions."""
        self._rounds.forget_before(position)
        if self._sampler is not None:
            self._sampler.forget_before(self._draws(position))

    def close(self) -> None:
        """Shut down the workers."""
        iterator, self._iterator = self._iterator, None
        self._own._iterator = None
        shut_down(iterator)


def with_options_of(
    loader: DataLoader[Any],
    dataset: Any,
    generator: torch.Generator,
    collate: Any,
    feed: dict[str, Any],
) -> DataLoader[Any]:
    """Create a loader of another dataset and sampler with the options of a given one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # too many workers: the given loader has warned
        return DataLoader(
            dataset,
            **feed,
            num_workers=loader.num_workers,
            collate_fn=collate,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory_device=loader.pin_memory_device,
            in_order=loader.in_order,
        )


def warn_of_num_workers(name: str, before: int, now: int) -> None:
    """Warn that the states of datasets in workers cannot be restored."""
    log.warning(
        "The resumed run may differ: the number of processes that load %s was %d at the checkpoint "
        "and is now %d, so the state of its dataset is not restored. Use the same num_workers to "
        "avoid this.",
        name,
        before,
        now,
    )


def warn_of_earlier_state(name: str) -> None:
    """Warn that the checkpoint has a state of torchdata's loader, which is no longer used."""
    log.warning(
        "The resumed run may differ: the checkpoint was saved by an earlier version of the "
        "trainer, whose data order of %s cannot be restored. The epoch continues at the same batch "
        "number, but in another order.",
        name,
    )


class _Feed:
    """A sampler whose next epoch is set from outside."""

    def __init__(self) -> None:
        self.items: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.items


class PositionedSource(Source):
    """The batches of a plain torch loader over a map-style dataset, see `PositionedLoader`.

    The number of samples of each rank is known from the order. With a custom collate function, the
    first batch of an epoch shows whether it keeps that number; if not, or if samples are not
    batched, ranks exchange their numbers for each batch.

    Args:
        loader: The loader.
        split: How ranks divide it.
        exchange: Gathers a number from all ranks. Collective.
        name: The argument's name, for messages.
    """

    loader: DataLoader[Any]

    def __init__(
        self,
        loader: DataLoader[Any],
        split: Split,
        exchange: Exchange,
        name: str = "train_dataloader",
    ) -> None:
        super().__init__(loader, name)
        self._positioned = PositionedLoader(loader, split, name)
        self.seeds_host = self._positioned.seeds_host
        self.seeds_ahead = self._positioned.seeds_ahead
        self.draws = self._positioned.draws
        self.keeps_state = self._positioned.keeps_state
        self._split = split
        self._exchange = exchange
        puts_together = collates_plainly(loader.collate_fn) and (
            isinstance(loader.dataset, BatchDataset)
            or getattr(loader.dataset, "__getitems__", None) is None
        )
        self._keeps_number = puts_together and loader.batch_sampler is not None

    @override
    def begin_marked(self, start: EpochStart) -> MarkedBatches:
        if self.loader.num_workers and not self.loader.in_order:
            self._warn_of_order(start.batch_idx)
        if start.restores and "state" in (start.loader_state or ()):
            warn_of_earlier_state(self.name)
        items = self._positioned.begin(start)
        if self._split.count > 1:
            return self._sharded(items, needs_sizes=start.needs_sizes)
        return items

    @override
    def begin(self, start: EpochStart) -> NumberedBatches:
        return ((number, batch) for batch, _, number in self.begin_marked(start))

    def _warn_of_order(self, num: int) -> None:
        if num:
            log.warning(
                "The resumed run may differ: %s has in_order=False, so it is unknown which "
                "batches were trained on; the first %d of the epoch are skipped. Use "
                "in_order=True.",
                self.name,
                num,
            )
        elif not self._is_begun:
            log.warning(
                "A resumed run may differ: %s has in_order=False, so the order of batches depends "
                "on the speed of the workers. Use in_order=True.",
                self.name,
            )
        self._is_begun = True

    def _sharded(self, items: MarkedBatches, *, needs_sizes: bool) -> MarkedBatches:
        keeps_number: bool | None = True if self._keeps_number else None  # None = not known yet
        info = ShardInfo((), is_padding=False)
        for batch, is_last, number in items:
            draw = self._positioned.draw
            sizes = draw.sizes
            if sizes is None or not keeps_number:
                sizes = tuple(self._exchange(0 if draw.is_padding else size_of(batch)))
                if keeps_number is None:
                    keeps_number = sizes == draw.sizes and not needs_sizes
            if info.sizes is not sizes or info.is_padding != draw.is_padding:
                info = ShardInfo(sizes, draw.is_padding)  # full batches share one object
            yield ShardedBatch(batch, info), is_last, number

    @override
    def state(self, position: int | None) -> LoaderState | None:
        return self._positioned.state(position)

    @override
    def forget_before(self, position: int) -> None:
        self._positioned.forget_before(position)

    @override
    def close(self) -> None:
        self._positioned.close()
