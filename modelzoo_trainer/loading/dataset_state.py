"""Datasets that change while samples are loaded: save their state, or log a warning."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from modelzoo_trainer.loading.hidden_state import OF_LOADING, Snapshot, changed, snapshot
from modelzoo_trainer.loading.shared_memory import shared

log = logging.getLogger("modelzoo_trainer.data")

COLLATE: Final = "collate_fn"
"""What paths of the attributes of a collate function begin with."""
NUM_LOOKS: Final = 2
"""Batches of each process after which a dataset is compared with what it was."""
_NUM_BYTES: Final = 200
_MOST_WAITING: Final = 64  # batches of one worker while another has none (it has ended)


class LoadedBatch(NamedTuple):
    """A batch with metadata from the process that loaded it.

    Args:
        batch: The batch.
        worker: The number of the worker.
        state: The dataset's state after the batch; None = not requested.
        num_samples: Samples on all ranks, if they divide a stream.
    """

    batch: Any
    worker: int
    state: Any
    num_samples: int


class Collation:
    """A user's collate function, followed by a check of the dataset.

    Args:
        collate: The user's collate function.
        observer: The dataset's observer.
        reports: Whether to return batches as `LoadedBatch`.
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
    """Record how loading changes a dataset; each worker has a copy.

    Args:
        owners: Objects that may change, by name: the dataset and the collate function.
        stateful: The dataset, or an iterator over it, with `state_dict` and `load_state_dict`;
            the state is returned with each batch. None = neither has them.
        notes: Receives the names of attributes that the first two batches change; None = not
            checked.
    """

    def __init__(
        self, owners: Mapping[str, Any], stateful: Any = None, notes: Notes | None = None
    ) -> None:
        self.stateful = stateful
        self.states: list[Any] | None = None
        """For each worker: the state of its dataset before it loads anything."""
        self.num_samples = 0
        """Samples of the current batch over all ranks, if they divide a stream."""
        self.worker = 0
        self.is_due = True
        """Whether `begin` is still due: the next batch is the first of this process."""
        self.is_looking = False
        self._owners = owners
        self._notes = notes
        self._before: Snapshot = {}
        self._names: dict[str, None] = {}
        self._num_batches = 0

    def begin(self) -> None:
        """Find the worker id and take a snapshot of the dataset before its first batch."""
        self.is_due = False
        info = get_worker_info()
        if info is not None:  # hidden by a `ShardedStream` in later epochs
            self.worker = info.id
        if self._notes is not None:
            self._before = snapshot(self._owners, OF_LOADING)
            self._names, self._num_batches = {}, 0
            self.is_looking = True

    def look(self) -> None:
        """Compare the dataset with its latest snapshot.

        Called after the first sample, if samples are loaded one by one, and after each of the first
        two batches: what was made for the first sample, such as an open file, does not change
        after others, but state does.
        """
        after = snapshot(self._owners, OF_LOADING)
        self._names |= dict.fromkeys(changed(self._before, after))
        self._before = after

    def end(self) -> None:
        """Look at the dataset after a batch; note the names of what has changed."""
        self._num_batches += 1
        self.look()
        if self._names and self._notes is not None:
            self._notes.write(", ".join(self._names))
        if self._names or self._num_batches == NUM_LOOKS:
            self.is_looking, self._before = False, {}

    def restore(self) -> bool:
        """Restore this worker's state of the dataset, once; return whether there was one."""
        states, self.states = self.states, None
        if states is None or states[self.worker] is None:
            return False
        self.stateful.load_state_dict(copy.deepcopy(states[self.worker]))
        return True

    def loaded(self, batch: Any) -> LoadedBatch:
        """Return the batch just loaded, with the state of the dataset."""
        state = None if self.stateful is None else copy.deepcopy(self.stateful.state_dict())
        return LoadedBatch(batch, self.worker, state, self.num_samples)


class Rounds:
    """The states of the datasets of all workers after each round.

    Workers take turns: after a round all have loaded the same number of batches, and a new loader
    starts with worker 0. A resumed run therefore starts after a round and drops the batches before
    its position.

    Args:
        num_workers: The loader's; 0 counts as 1.
    """

    def __init__(self, num_workers: int) -> None:
        self._num = max(1, num_workers)
        self.begin(0, None)

    def begin(self, number: int, states: list[Any] | None) -> None:
        """Start an epoch at a batch with these states; None = initial states."""
        self._rounds = deque([(number, states)])
        self._waiting: list[deque[Any]] = [deque() for _ in range(self._num)]
        self._latest = list(states or [None] * self._num)
        self._is_over = False

    def add(self, number: int, worker: int, state: Any) -> None:
        """Add the state of a worker after a batch; `number` batches have been received by then."""
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
        """Return the latest round completed within `position` batches."""
        number, states = next(each for each in reversed(self._rounds) if each[0] <= position)
        return {"batch_idx": number, "states": states}

    def at_end(self) -> dict[str, Any]:
        """Return the states of all workers at the end of an epoch."""
        return {"batch_idx": 0, "states": list(self._latest)}

    def forget_before(self, position: int) -> None:
        """Drop rounds that no position from this one on needs."""
        while len(self._rounds) > 1 and self._rounds[1][0] <= position:
            self._rounds.popleft()


class Notes:
    """A short text in shared memory, written by workers.

    Args:
        num_workers: The loader's.
    """

    def __init__(self, num_workers: int) -> None:
        memory: Tensor = torch.zeros(_NUM_BYTES, dtype=torch.uint8)
        self._memory = shared(memory) if num_workers else memory
        self._num_left = NUM_LOOKS * max(1, num_workers)

    @property
    def is_final(self) -> bool:
        """Whether nothing is written any more, asked for each batch that is received."""
        self._num_left -= 1
        return self._num_left <= 0

    def write(self, text: str) -> None:
        """Write a text, truncated to fit."""
        data = text.encode()[:_NUM_BYTES]
        self._memory[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def read(self) -> str:
        """Return the text; "" if none was written."""
        return bytes(self._memory.tolist()).rstrip(b"\0").decode(errors="ignore")


def warn_of_change(loader: Any, names: str, loader_name: str) -> None:
    """Warn that loading has changed the dataset of a DataLoader or its collate function.

    Args:
        loader: The DataLoader.
        names: The attributes, separated by ", "; attributes of the collate function begin with its
            name.
        loader_name: What messages call the loader.
    """
    of_collate = [name.removeprefix("len(").startswith(COLLATE) for name in names.split(", ")]
    dataset, collate = type(loader.dataset).__name__, loader.collate_fn
    whose = [] if all(of_collate) else [f"dataset of {loader_name} ({dataset})"]
    state = "give the dataset state_dict() and load_state_dict()"
    if any(of_collate):
        kind = getattr(collate, "__name__", type(collate).__name__)
        whose.append(f"collate function of {loader_name} ({kind})")
        state = "keep them in the dataset, with state_dict() and load_state_dict()"
    log.warning(
        "A resumed run may differ: loading a batch changed attributes of the %s: %s. If samples "
        "depend on these attributes, either draw all random numbers from random, numpy.random or "
        "torch (the trainer seeds them for each batch), or %s.",
        " and the ".join(whose),
        names,
        state,
    )
