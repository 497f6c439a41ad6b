"""Torch loaders over iterable datasets, whose samples come from iterators in workers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from itertools import chain, count, islice
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe
from torch.utils.data import _utils as torch_workers
from typing_extensions import override

from modelzoo_trainer.callback import Batch
from modelzoo_trainer.loading.attribute_values import has_state
from modelzoo_trainer.loading.batch_seeds import DatasetWrapper, mixed, seed_generators, spread
from modelzoo_trainer.loading.dataloader import (
    is_plain,
    warn_of_earlier_state,
    warn_of_num_workers,
    with_options_of,
)
from modelzoo_trainer.loading.dataset_state import (
    Collation,
    DatasetObserver,
    LoadedBatch,
    Notes,
    Rounds,
    warn_of_change,
)
from modelzoo_trainer.loading.hidden_state import OF_DATA, HiddenState
from modelzoo_trainer.loading.position import EpochStart, LoaderState
from modelzoo_trainer.loading.sharded_stream import ShardedStream
from modelzoo_trainer.loading.sharding import ShardedBatch, ShardInfo, Split
from modelzoo_trainer.loading.shared_memory import shared
from modelzoo_trainer.loading.source import (
    NumberedBatches,
    Source,
    hidden_states,
    log_skipped,
    place_of,
)
from modelzoo_trainer.loading.workers import shut_down, start_iterator

log = logging.getLogger("modelzoo_trainer.data")

_NOTHING: Final = object()
_MOST_BITS: Final = 64  # of a seed chosen by a user
_HUGGING_FACE: Final = "datasets.iterable_dataset"


def is_stream(loader: Any) -> bool:
    """Return whether a loader is torch's or torchdata's own, over an iterable dataset."""
    dataset = getattr(loader, "dataset", None)
    is_iterable = isinstance(dataset, IterableDataset) and not isinstance(dataset, IterDataPipe)
    return is_plain(loader) and is_iterable


class SeededStream(DatasetWrapper, IterableDataset[Any]):
    """A stream that seeds the generators at the start of each epoch and batch.

    Also in persistent workers: the seeds of an epoch are in shared memory.

    Args:
        loader: The loader of the stream.
        split: How ranks divide a `ShardedStream`.
        observer: The dataset's observer.
        keeps_state: Whether the state of the dataset is used.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        split: Split,
        observer: DatasetObserver,
        *,
        keeps_state: bool,
    ) -> None:
        self.dataset = loader.dataset
        self.observer = observer
        self.ended: str | None = None
        """Set if the states to restore are from the end of an epoch: "over", or "cut" before it."""
        self._has_drawn = False
        self._seeds = 0, 0
        self._keeps_state = keeps_state
        self._size = loader.batch_size or 1
        """Samples per batch; over all ranks, if their batches are slices of the loader's."""
        self._drops_last = loader.drop_last
        self._split = split
        self._num_workers = max(1, loader.num_workers)
        self._shared = shared(torch.zeros(5, dtype=torch.int64))

    def begin(self, start: EpochStart, first: int, num_skipped: int) -> None:
        """Set the start of the next epoch.

        Args:
            start: The start of the epoch.
            first: The number of the first batch of each worker.
            num_skipped: Samples to skip of a `ShardedStream`.
        """
        seeds = start.seeds
        values = [start.epoch, seeds.order, seeds.samples, first, num_skipped]
        self._shared.copy_(torch.tensor(values))

    def __iter__(self) -> Iterator[Any]:
        """Start an epoch; called in the worker."""
        epoch, order, samples, first, num_skipped = self._shared.tolist()
        observer, dataset = self.observer, self.dataset
        observer.begin()
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        if isinstance(dataset, ShardedStream):
            # The dataset must read all samples here, though others shard themselves by worker.
            torch_workers.worker._worker_info = None
            return self._divided(dataset, samples, num_skipped)
        seed = mixed(samples, observer.worker)
        self._seeds = mixed(order, observer.worker), spread(seed, first)
        seed_generators(self._seeds[0])
        return self._seeded(self._restored(dataset), seed, first)

    def _restored(self, dataset: Any) -> Iterator[Any]:
        """Return an iterator over the dataset, after restoring its state, if it has one."""
        observer = self.observer
        ended, self.ended = self.ended, None  # later epochs of persistent workers start anew
        if self._keeps_state and has_state(dataset):
            observer.stateful = dataset
            if observer.restore() and ended is not None:
                return self._after_end(dataset, ended)
        given: Iterator[Any] = iter(dataset)
        if self._keeps_state and observer.stateful is not dataset and has_state(given):
            observer.stateful = given
            observer.restore()
        return given

    def _after_end(self, dataset: Any, ended: str) -> Iterator[Any]:
        """Return an iterator over the epoch after the one whose final state was restored.

        After its last whole batch, a dataset may not know yet that the epoch is over.
        """
        given: Iterator[Any] = iter(dataset)
        if ended == "over":
            seed_generators(self._seeds[1])
            first = next(given, _NOTHING)
            if first is not _NOTHING:
                self._has_drawn = True
                return chain((first,), given)
            seed_generators(self._seeds[0])
        return iter(dataset)

    def _seeded(self, given: Iterator[Any], seed: int, first: int) -> Iterator[Any]:
        """Yield samples, and seed the generators before each batch."""
        has_drawn, self._has_drawn = self._has_drawn, False
        for number in count(first):
            if not has_drawn:
                seed_generators(spread(seed, number))
            has_drawn = False
            num = 0
            for sample in islice(given, self._size):
                num += 1
                if num == 1 and self.observer.is_looking:
                    self.observer.look()
                yield sample
            if num < self._size:
                return

    def _begun(self, dataset: ShardedStream, seed: int, position: int) -> tuple[Iterator[Any], int]:
        """Return an iterator that starts at a position if possible, and its actual start."""
        skip = getattr(dataset.samples, "iter_from", None) if position else None
        read = 0 if skip is None else position
        seed_generators(spread(seed, read))
        return iter(dataset) if skip is None else iter(skip(position)), read

    def _divided(self, dataset: ShardedStream, seed: int, position: int) -> Iterator[Any]:
        """Yield this rank's part of every n-th batch over all ranks, for n workers."""
        worker, num_workers = self.observer.worker, self._num_workers
        whole = self._split.per_batch * self._size
        given, read = self._begun(dataset, seed, position)
        while read < position:  # with the same seeds as then
            num = min(whole, position - read)
            seed_generators(spread(seed, read))
            deque(islice(given, num), maxlen=0)
            read += num
        for number in count():
            seed_generators(spread(seed, position))
            group = list(islice(given, whole))
            is_full = len(group) == whole
            if not group or (self._drops_last and not is_full):
                return
            if number % num_workers == worker:
                begin, end = self._split.part(len(group))
                self.observer.num_samples = len(group)
                yield from group[begin:end] or group[:1]
            if not is_full:
                return
            position += whole


class StreamSource(Source):
    """The batches of a plain torch loader over an iterable dataset.

    A run resumes in the middle of an epoch if the dataset, or the iterator over it, has
    `state_dict` and `load_state_dict`: each worker gets its state back. For other streams, batches
    already trained on are reloaded and dropped, starting with the attributes that the dataset had
    at the start of the epoch. A `ShardedStream` skips samples.

    Args:
        loader: The loader.
        split: How ranks divide a `ShardedStream`; None = it belongs to this rank.
        name: The argument's name, for messages.
    """

    loader: DataLoader[Any]

    def __init__(self, loader: DataLoader[Any], split: Split | None, name: str) -> None:
        super().__init__(loader, name)
        dataset: Any = loader.dataset
        has_workers = loader.num_workers > 0
        self.seeds_host, self.draws = not has_workers, True
        self._split = split
        self._is_divided = isinstance(dataset, ShardedStream)
        self._shuffles = shuffle_generators(dataset)
        self._notes: Notes | None = None
        if not self._is_divided and not has_state(dataset):
            if not has_workers:
                self._hidden = HiddenState({"dataset": dataset}, OF_DATA)
            elif loader.persistent_workers:  # else each epoch's workers get new copies
                self._notes = Notes(loader.num_workers)
        self._observer = DatasetObserver({"dataset": dataset}, notes=self._notes)
        self._stream = SeededStream(
            loader, split or Split(), self._observer, keeps_state=not self._shuffles
        )
        self._generator = torch.Generator()
        size = loader.batch_size
        if split is not None and split.is_global and size is not None:
            size //= split.count
        self._own = with_options_of(
            loader,
            self._stream,
            self._generator,
            Collation(loader.collate_fn, self._observer, reports=True),
            {"batch_size": size, "drop_last": loader.drop_last},
        )
        self._rounds = Rounds(loader.num_workers)
        self._has_states = False
        self._num_received = 0
        self._is_over = self._follows_cut = False

    @override
    def begin(self, start: EpochStart) -> NumberedBatches:
        saved: LoaderState = {}
        if start.restores:
            saved = start.loader_state or {}
        elif self._is_ahead:
            saved = {"rounds": self._rounds.at_end() | {"is_cut": True}}
        if saved or start.restores or not self._own.persistent_workers:
            self.close()
        if not self._is_begun and any(map(has_no_seed, self._shuffles)):
            log.warning(
                "A resumed run may differ: the stream of %s is shuffled without a seed, so its "
                "order differs in each run. Pass shuffle(seed=...).",
                self.name,
            )
        if not self._is_begun:
            self.warn_of_iterators()
        self._is_begun = True
        self.begin_attributes(saved, start.epoch)
        self._checksums.begin(saved)
        first, states = self._begin_rounds(start, saved)
        num_skipped = 0
        if self._is_divided:
            first, num_skipped = start.batch_idx, start.offset * (self.loader.batch_size or 1)
        elif states is None:
            self.warn_of_loading(start.batch_idx)
        num_workers = max(1, self.loader.num_workers)
        self._observer.states = states
        self._stream.begin(start, first // num_workers, num_skipped)
        self._generator.manual_seed(start.seeds.order)
        self._iterator = start_iterator(self._own)
        return self._received(self._iterator, start, first)

    @property
    def _is_ahead(self) -> bool:
        """Whether workers have loaded more of a cut epoch than was trained on."""
        is_cut = self._num_received > 0 and not self._is_over
        return is_cut and self._has_states and self._own.persistent_workers

    def _begin_rounds(self, start: EpochStart, saved: LoaderState) -> tuple[int, list[Any] | None]:
        """Return the first batch of workers, and their states."""
        num = max(1, self.loader.num_workers)
        found = saved.get("rounds") or self._rounds_of_before(saved)
        first, states = found["batch_idx"], found["states"]
        if states is not None and len(states) != num:
            warn_of_num_workers(self.name, len(states), num)
            first, states = 0, None
        is_end = states is not None and "is_cut" in found and not first
        self._stream.ended = ("cut" if found["is_cut"] else "over") if is_end else None
        kept = states
        if not start.restores and self._keeps_workers and has_state(self.loader.dataset):
            kept = self._rounds.at_end()["states"]  # unchanged
            self._follows_cut = not self._is_over
        elif is_end:
            self._follows_cut = found["is_cut"]
        self._rounds.begin(first, kept)
        self._is_over = False
        return first, states

    def _rounds_of_before(self, saved: LoaderState) -> dict[str, Any]:
        """Return the states in a checkpoint of an earlier version."""
        if "state" not in saved:
            return {"batch_idx": 0, "states": None}
        if type(self.loader) is DataLoader:  # state of the dataset, without workers
            return {key: saved[key] for key in ("batch_idx", "is_cut")} | {
                "states": [saved["state"]]
            }
        warn_of_earlier_state(self.name)
        return {"batch_idx": 0, "states": None}

    def _received(
        self, iterator: Iterator[LoadedBatch], start: EpochStart, first: int
    ) -> NumberedBatches:
        self.latest = None
        for number in count(first):
            try:
                loaded = next(iterator)
            except StopIteration:
                self._is_over = True
                return
            except Exception as error:
                error.add_note(place_of(self.name, start.epoch, number))
                raise
            self.latest = (loaded.batch,)
            self._num_received = number + 1
            if not self._has_looked:
                self.look()
            if start.needs_state:
                self._note(number + 1, loaded)
            if number < start.batch_idx:
                continue
            if number in start.skipped:
                log_skipped(start.epoch, number)
                continue
            yield number, self._batch_of(loaded)

    def _note(self, num: int, loaded: LoadedBatch) -> None:
        """Record the state for a run resumed after `num` batches."""
        if loaded.state is not None:
            self._has_states = True
            self._rounds.add(num, loaded.worker, loaded.state)
        elif self._checksums.add(num, loaded.batch):
            self.warn_of_other_batches()

    def _batch_of(self, loaded: LoadedBatch) -> Batch:
        split = self._split
        if split is None or split.count == 1:
            return loaded.batch
        sizes = split.sizes(loaded.num_samples)
        return ShardedBatch(loaded.batch, ShardInfo(sizes, is_padding=not sizes[split.index]))

    @override
    def look(self) -> None:
        super().look()
        notes = self._notes
        if notes is None:
            return
        names = notes.read()
        if names or notes.is_final:
            self._notes = None
        if names:
            warn_of_change(self.loader, names, self.name)
        self._has_looked = self._notes is None

    @property
    def _keeps_workers(self) -> bool:
        """Whether a dataset continues from epoch to epoch; else workers start with new copies."""
        return not self.loader.num_workers or self.loader.persistent_workers

    @override
    def state(self, position: int | None) -> LoaderState | None:
        found: LoaderState = self._checksums.state(position)
        if self._has_states:
            if position is not None:
                if self._is_over:  # others have batches left; the last one is repeated as padding
                    position = min(position, self._num_received - 1)
                found["rounds"] = self._rounds.at(position)
                if not found["rounds"]["batch_idx"]:  # the states at the end of the previous epoch
                    found["rounds"]["is_cut"] = self._follows_cut
            elif has_state(self.loader.dataset) and self._keeps_workers:
                found["rounds"] = self._rounds.at_end() | {"is_cut": not self._is_over}
        if self._hidden is not None:
            found |= hidden_states(self._hidden) if position is None else self._attributes
        return found or None

    @override
    def forget_before(self, position: int) -> None:
        super().forget_before(position)
        self._rounds.forget_before(position - 1)

    @override
    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        self._own._iterator = None
        shut_down(iterator)


def shuffle_generators(dataset: Any) -> list[np.random.Generator]:
    """Return the generators of a Hugging Face stream that is shuffled through a buffer.

    The state of such a stream lacks the buffer (see `datasets.IterableDataset.state_dict`), so its
    samples must be read again.
    """
    if type(dataset).__module__ != _HUGGING_FACE:
        return []
    found: list[np.random.Generator] = []
    waiting = [dataset._ex_iterable]
    while waiting:
        part = waiting.pop()
        generator = getattr(part, "generator", None)
        if isinstance(generator, np.random.Generator):
            found.append(generator)
        inner = [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
        waiting += [each for each in inner if each is not None]
    return found


def has_no_seed(generator: np.random.Generator) -> bool:
    """Return whether NumPy has seeded a generator itself, with 128 bits, as no user does."""
    entropy = getattr(generator.bit_generator.seed_seq, "entropy", None)
    return isinstance(entropy, int) and entropy.bit_length() > _MOST_BITS
