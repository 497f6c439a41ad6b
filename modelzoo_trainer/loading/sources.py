"""Where the batches of a pass come from, for each kind of loader: begin anywhere, pass over."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override

from modelzoo_trainer.callback import Batch
from modelzoo_trainer.loading.dataloader import PositionedLoader, can_be_positioned, log_skipped
from modelzoo_trainer.loading.per_sample import mixed, seed_generators
from modelzoo_trainer.loading.position import EpochSeeds
from modelzoo_trainer.loading.workers import shut_down, start_iterator

log = logging.getLogger("modelzoo_trainer.data")

Numbered = Iterator[tuple[int, Batch]]
LoaderState = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a pass begins, and what decides its random numbers.

    Args:
        epoch: The number of the pass.
        position: Batches to leave out: they were trained on before.
        passed_over: Numbers of other batches to leave out.
        seeds: Of its random numbers.
        before: Batches of earlier passes to leave out as well, where passes share an iterator.
        restores: Whether the position was loaded; if not, the pass follows the one before.
        loader_state: What `Source.state` returned for the position; None = nothing.
        first: What the loader draws for several processes: draws left out before batch 0.
        needs_sizes: Whether each batch's share of every process must be known exactly.
    """

    epoch: int
    position: int
    passed_over: frozenset[int]
    seeds: EpochSeeds
    before: int = 0
    restores: bool = False
    loader_state: LoaderState | None = None
    first: int = 0
    needs_sizes: bool = False

    def offset(self, per_batch: int) -> int:
        """Return how many draws to leave out, with so many a batch."""
        return self.first + self.position * per_batch


class Source:
    """The batches of any iterable: what was trained on is loaded again and dropped.

    `seeds_host` says whether the generators of this process are seeded while batches are fetched,
    `reads_to_end` whether a pass is over when the loader says so, whatever its length.

    Args:
        loader: The iterable.
    """

    seeds_host = True
    reads_to_end = False

    def __init__(self, loader: Iterable[Batch]) -> None:
        self.loader = loader
        self._iterator: Iterator[Batch] | None = None

    def begin(self, start: Start) -> Numbered:
        """Return an iterator over the numbers and batches of a pass."""
        self.close()
        num = start.before + start.position
        if num:
            log.warning(
                "train_dataloader (%s) cannot begin in the middle of a pass: %d batches are loaded "
                "and dropped. To begin at once, pass a torch DataLoader over a data set with "
                "indices, or give the loader state_dict() and load_state_dict().",
                type(self.loader).__name__,
                num,
            )
        seed_generators(start.seeds.order)
        self._iterator = start_iterator(self.loader)
        for _ in islice(self._iterator, start.before):
            pass
        return self._fetched(self._iterator, start, 0)

    def _fetched(self, iterator: Iterator[Batch], start: Start, first: int) -> Numbered:
        for number in count(first):
            seed_generators(mixed(start.seeds.fetches, number))
            try:
                batch = next(iterator)
            except StopIteration:
                self.note(None)
                return
            self.note(number + 1)
            if number < start.position:
                continue
            if number in start.passed_over:
                log_skipped(start.epoch, number)
                continue
            yield number, batch

    def note(self, position: int | None) -> None:
        """Note that so many batches have been fetched; None = all."""

    def state(self, position: int | None) -> LoaderState | None:
        """Return the loader's own state after so many batches; None = after a whole pass."""
        return None

    def forget_before(self, position: int) -> None:
        """Drop the states from before a position."""

    def close(self) -> None:
        """End the pass, and workers that were started for it."""
        iterator, self._iterator = self._iterator, None
        is_users = getattr(self.loader, "persistent_workers", False) or iterator is self.loader
        if not is_users:
            shut_down(iterator)


class SequenceSource(Source):
    """The batches of a list or a tuple."""

    seeds_host = False
    loader: list[Batch] | tuple[Batch, ...]

    @override
    def begin(self, start: Start) -> Numbered:
        if not start.position and not start.passed_over:
            return enumerate(self.loader)
        return self._kept(start)

    def _kept(self, start: Start) -> Numbered:
        for number in range(start.position, len(self.loader)):
            if number in start.passed_over:
                log_skipped(start.epoch, number)
                continue
            yield number, self.loader[number]


class PositionedSource(Source):
    """The batches of a plain torch loader over samples with indices, see `PositionedLoader`."""

    loader: DataLoader[Any]

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._positioned = PositionedLoader(loader)
        self.seeds_host = self._positioned.seeds_host

    @override
    def begin(self, start: Start) -> Numbered:
        self.warn_of_order(start)
        return self._positioned.begin(
            epoch=start.epoch,
            start=start.position,
            seeds=(start.seeds.order, start.seeds.samples),
            passed_over=start.passed_over,
        )

    def warn_of_order(self, start: Start) -> None:
        """Warn if the batches before the position are not those that were trained on."""
        if start.position and self.loader.num_workers and not self.loader.in_order:
            log.warning(
                "train_dataloader has in_order=False: which batches were trained on before is not "
                "known, the first %d of the pass are left out. Exactness is not guaranteed.",
                start.position,
            )

    @override
    def close(self) -> None:
        self._positioned.close()


class StatefulSource(Source):
    """The batches of a loader that keeps its own state: of the batch consumed, not of the fetched.

    The state is taken after each batch, as the next may be fetched before it is needed.

    Args:
        loader: The loader.
        owner: What has `state_dict` and `load_state_dict`: the loader, or its data set.

    Cost:
        A `state_dict()` and a copy of it each batch.
    """

    reads_to_end = True

    def __init__(self, loader: Iterable[Batch], owner: Any) -> None:
        super().__init__(loader)
        self._owner = owner
        self._states: dict[int | None, Any] = {}
        self._first: Any = None

    @override
    def begin(self, start: Start) -> Numbered:
        saved = start.loader_state
        self._states.clear()
        if start.restores and saved is None and start.position:
            return super().begin(start)
        self.close()
        seed_generators(start.seeds.order)
        first = start.position
        if start.restores and saved is not None:
            first = self._restore(saved)
        elif start.restores and self._first is not None:
            self._owner.load_state_dict(copy.deepcopy(self._first))
        if self._iterator is None:
            self._iterator = start_iterator(self.loader)
        self.note(first)
        if self._first is None and not start.restores:
            self._first = self._states[first]
        return self._fetched(self._iterator, start, first)

    def _restore(self, saved: LoaderState) -> int:
        """Give the loader its state; return the number of the batch that comes next."""
        try:
            self._owner.load_state_dict(copy.deepcopy(saved["state"]))
            self._iterator = start_iterator(self.loader)
        except Exception as error:
            error.add_note(
                "raised when train_dataloader got its state back; it may have been saved with "
                "other options of the loader, such as another num_workers"
            )
            raise
        if saved["is_cut"]:  # the pass was over, though not for the loader: it begins the next one
            shut_down(self._iterator)
            self._iterator = start_iterator(self.loader)
        return int(saved["batch_idx"])

    @override
    def note(self, position: int | None) -> None:
        self._states[position] = copy.deepcopy(self._owner.state_dict())

    @override
    def state(self, position: int | None) -> LoaderState | None:
        is_cut = False
        if position is None:  # the end of a pass
            is_cut, known = None not in self._states, 0
            where = max(self._numbers(), default=None) if is_cut else None
        else:
            where = max((n for n in self._numbers() if n <= position), default=None)
            known = where or 0
        if where not in self._states:
            return None
        return {"batch_idx": known, "state": self._states[where], "is_cut": is_cut}

    def _numbers(self) -> list[int]:
        return [number for number in self._states if number is not None]

    @override
    def forget_before(self, position: int) -> None:
        for number in self._numbers():
            if number < position and number != max(self._numbers()):
                del self._states[number]


def make_source(loader: Iterable[Batch]) -> Source:
    """Return where the batches of a loader come from."""
    owner = owner_of_state(loader)
    if owner is not None:
        return StatefulSource(loader, owner)
    if isinstance(loader, (list, tuple)):
        return SequenceSource(loader)
    if can_be_positioned(loader):
        return PositionedSource(loader)  # type: ignore[arg-type]  # checked just now
    return Source(loader)


def owner_of_state(loader: Any) -> Any:
    """Return what has the loader's own state: itself, its data set, or None."""
    if _has_state(loader):
        return loader
    if type(loader) is DataLoader and not loader.num_workers and not can_be_positioned(loader):
        return loader.dataset if _has_state(loader.dataset) else None
    return None


def _has_state(owner: Any) -> bool:
    return callable(getattr(owner, "state_dict", None)) and callable(
        getattr(owner, "load_state_dict", None)
    )
