"""Data sets that change while samples are loaded: their state is saved, or a warning is logged."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from modelzoo_trainer.loading.hidden_state import changed, snapshot

log = logging.getLogger("modelzoo_trainer.data")

_NUM_BYTES: Final = 200
_MOST_WAITING: Final = 64  # batches of a worker while another one has none: it has ended


class Loaded(NamedTuple):
    """A batch, and what is known of it where it was loaded.

    Args:
        batch: The batch.
        worker: The number of the worker.
        state: Of the data set, after the batch; None = not asked for.
        num_samples: Of all processes, if they divide a stream.
    """

    batch: Any
    worker: int
    state: Any
    num_samples: int


class Collation:
    """A user's collation, after which the observer of the data set has a look.

    Args:
        collate: The user's.
        observer: Of the data set.
        reports: Whether a batch is returned with what the observer knows of it, as `Loaded`.
    """

    def __init__(
        self, collate: Callable[[Any], Any], observer: DatasetObserver, *, reports: bool
    ) -> None:
        self.collate = collate
        self.observer = observer
        self.reports = reports

    def __call__(self, samples: Any) -> Any:
        """Collate samples."""
        batch = self.collate(samples)
        if self.observer.is_looking:
            self.observer.end()
        return self.observer.loaded(batch) if self.reports else batch


class DatasetObserver:
    """Sees what loading does to a data set; in each worker there is a copy.

    Args:
        owners: What may change, by name: the data set, and the collation.
        stateful: What has `state_dict` and `load_state_dict`: the data set, or an iterator over it;
            each batch brings its state. None = neither.
        notes: Gets the names of attributes that the first batch has changed; None = not looked at.
    """

    def __init__(
        self, owners: Mapping[str, Any], stateful: Any = None, notes: Notes | None = None
    ) -> None:
        self.stateful = stateful
        self.states: list[Any] | None = None
        """Of each worker: what its data set gets before it loads anything."""
        self.num_samples = 0
        """Of the batch at hand, of all processes, if they divide a stream."""
        self.worker = 0
        self.is_due = True
        """Whether `begin` is to be called: the next batch is the first of this process."""
        self.is_looking = False
        self._owners = owners
        self._notes = notes
        self._before: dict[str, tuple[int, bool]] = {}

    def begin(self) -> None:
        """Note which worker this is, and look at the data set before its first batch."""
        self.is_due = False
        info = get_worker_info()
        if info is not None:  # a `ShardedStream` hides it in later epochs
            self.worker = info.id
        if self._notes is not None:
            self._before = snapshot(self._owners)
            self.is_looking = True

    def end(self) -> None:
        """Look at the data set after its first batch, and note what has changed."""
        self.is_looking = False
        notes, self._notes = self._notes, None
        if notes is not None and (names := changed(self._before, snapshot(self._owners))):
            notes.write(", ".join(names))

    def restore(self) -> bool:
        """Give the data set the state of this worker, once; return whether there was one."""
        states, self.states = self.states, None
        if states is None or states[self.worker] is None:
            return False
        self.stateful.load_state_dict(copy.deepcopy(states[self.worker]))
        return True

    def loaded(self, batch: Any) -> Loaded:
        """Return a batch that has just been loaded, with the state of the data set."""
        state = None if self.stateful is None else copy.deepcopy(self.stateful.state_dict())
        return Loaded(batch, self.worker, state, self.num_samples)


class Rounds:
    """The states of the data sets of all workers, after equally many batches of each.

    Workers take turns: after a round all have loaded equally many batches, and a loader that is
    started then gives the next one to worker 0, as the first did. So a run that resumes begins
    after a round, and drops what comes before its position.

    Args:
        num_workers: Of the loader; 0 counts as one.
    """

    def __init__(self, num_workers: int) -> None:
        self._num = max(1, num_workers)
        self.begin(0, None)

    def begin(self, number: int, states: list[Any] | None) -> None:
        """Begin an epoch at a batch with these states; None = as the data set was given."""
        self._rounds = deque([(number, states)])
        self._waiting: list[deque[Any]] = [deque() for _ in range(self._num)]
        self._latest = list(states or [None] * self._num)
        self._is_over = False

    def add(self, number: int, worker: int, state: Any) -> None:
        """Add the state of a worker after a batch; `number` batches have been received then."""
        self._latest[worker] = state
        if self._is_over:
            return
        self._waiting[worker].append(state)
        if all(self._waiting):
            self._rounds.append((number, [waiting.popleft() for waiting in self._waiting]))
        elif len(self._waiting[worker]) > _MOST_WAITING:
            self._is_over = True
            self._waiting.clear()

    def at(self, position: int) -> dict[str, Any]:
        """Return the latest round that was complete after `position` batches."""
        number, states = next(each for each in reversed(self._rounds) if each[0] <= position)
        return {"batch_idx": number, "states": states}

    def at_end(self) -> dict[str, Any]:
        """Return what all workers have at the end of an epoch."""
        return {"batch_idx": 0, "states": list(self._latest)}

    def forget_before(self, position: int) -> None:
        """Drop rounds that nobody asks for from a position on."""
        while len(self._rounds) > 1 and self._rounds[1][0] <= position:
            self._rounds.popleft()


def shared(tensor: Tensor) -> Tensor:
    """Return a tensor after moving it to memory that processes share."""
    moved: Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return moved


class Notes:
    """A short text in memory that processes share, written by workers.

    Args:
        is_shared: Whether there are workers.
    """

    def __init__(self, *, is_shared: bool) -> None:
        memory: Tensor = torch.zeros(_NUM_BYTES, dtype=torch.uint8)
        self._memory = shared(memory) if is_shared else memory

    def write(self, text: str) -> None:
        """Write a text, of which the beginning is kept."""
        data = text.encode()[:_NUM_BYTES]
        self._memory[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def read(self) -> str:
        """Return what was written; "" if nothing was."""
        return bytes(self._memory.tolist()).rstrip(b"\0").decode(errors="ignore")


def warn_of_change(dataset: Any, names: str, loader_name: str) -> None:
    """Warn that loading has changed a data set or its collation."""
    log.warning(
        "Exactness is not guaranteed: loading a batch changed attributes of the data set of %s "
        "(%s): %s. If samples depend on them, a resumed run will not reproduce the original one. "
        "Draw from the generators of random, numpy.random or torch, which are seeded for each "
        "batch, or give the data set state_dict() and load_state_dict().",
        loader_name,
        type(dataset).__name__,
        names,
    )
