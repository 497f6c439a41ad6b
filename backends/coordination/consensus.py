"""Consensus of all ranks on what to do at the same step: a log of proposals, no collectives."""

from __future__ import annotations

import json
import threading
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from .failures import Failure, RunFailed

Entry = dict[str, Any]
PROPOSE: Final = "propose"
COMMIT: Final = "commit"
FAIL: Final = "fail"
LIVENESS_CHECK: Final = "liveness check"
OVER: Final = "over"
END: Final = "end"
# The store writes timeouts to stderr, so waits have none.
_FOREVER: Final = timedelta(days=7)


class EventLog:
    """One reader and writer of the run's event log; not thread-safe.

    Writing never waits: entries are numbered, and the first writer of a number wins. Others read
    that entry, which may make their own unnecessary: a signal that reaches a thousand ranks at once
    makes one entry, not a thousand.

    `store`: a separate connection.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.num_read = 0
        self.failure: Entry | None = None
        self.liveness_check: int | None = None
        self.is_over = False
        self._open: dict[int, str] = {}
        self._committed: dict[str, int] = {}

    def next(self) -> tuple[int, Entry]:
        """Wait for the next entry; return it with its number."""
        key = self._key()
        while True:
            with suppress(DistStoreError):
                self.store.wait([key], _FOREVER)
                return self._read(self.store.get(key))

    def post(self, entry: Entry) -> bool:
        """Write an entry; return whether it was necessary, given the entries of others."""
        text = json.dumps({**entry, "id": uuid.uuid4().hex})
        while True:
            while self.store.check([self._key()]):  # an entry read late may be outdated
                self._read(self.store.get(self._key()))
            if self._is_needless(entry):
                return False
            found = self.store.compare_set(self._key(), "", text)
            self._read(found)
            if found == text.encode():
                return True

    def _key(self) -> str:
        return f"log/{self.num_read}"

    def _read(self, text: bytes) -> tuple[int, Entry]:
        number, entry = self.num_read, json.loads(text)
        self.num_read += 1
        what = entry["what"]
        if what == PROPOSE:
            self._open[number] = entry["topic"]
        elif what == COMMIT:
            self._open.pop(entry["number"], None)
            self._committed[entry["topic"]] = entry["point"]
        elif what == FAIL and self.failure is None:
            self.failure = entry
        elif what == LIVENESS_CHECK and self.liveness_check is None:
            self.liveness_check = number
        elif what == OVER:
            self.is_over = True
        return number, entry

    def _is_needless(self, entry: Entry) -> bool:
        what = entry["what"]
        if what == PROPOSE:
            topic = entry["topic"]
            is_coming = self._committed.get(topic, 0) > entry["point"]
            return self.is_over or is_coming or topic in self._open.values()
        if what == FAIL:
            return self.failure is not None
        if what == LIVENESS_CHECK:
            return self.liveness_check is not None or self.failure is not None
        return what == OVER and self.is_over


_FAR: Final = 1 << 62


class Consensus:
    """The decision points of this rank's main thread."""

    def __init__(self) -> None:
        self._point = 0
        self._limit = _FAR  # the next point at which to wait
        self._open: set[int] = set()
        self._due: dict[int, list[tuple[int, str]]] = {}
        self._failure: Failure | None = None
        self._changed = threading.Condition()

    @property
    def point(self) -> int:
        """The number of the last point that the main thread has reached."""
        return self._point

    def decided(self) -> tuple[str, ...]:
        """Advance to the next point, and return the topics to act on there.

        Raises:
            RunFailed: If the run has failed.

        Cost:
            Two comparisons; waits for the other ranks while a decision is being made.
        """
        # `hold` sets the limit before it reads the point; here the order is reversed. So either
        # the answer includes this point, or this call sees the limit.
        self._point = point = self._point + 1
        if point < self._limit:
            return ()
        return self._wait_for_commit(point)

    def _wait_for_commit(self, point: int) -> tuple[str, ...]:
        with self._changed:
            while self._open and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                raise RunFailed(self._failure)
            topics = self._due.pop(point, [])
            self._set_limit()
        return tuple(dict.fromkeys(topic for _, topic in sorted(topics)))

    def hold(self, number: int) -> int:
        """Make the main thread wait for a proposal at its next point; return its last point."""
        with self._changed:
            self._open.add(number)
            self._set_limit()
            return self._point

    def commit(self, number: int, topic: str, point: int) -> None:
        """Let the main thread continue; it returns the topic at the point.

        No rank has reached the point yet. No-op if the proposal is not open.
        """
        with self._changed:
            if number in self._open:
                self._open.remove(number)
                self._due.setdefault(point, []).append((number, topic))
                self._set_limit()
                self._changed.notify_all()

    def drop(self) -> None:
        """Forget open proposals: a rank has reached its last point."""
        with self._changed:
            self._open.clear()
            self._set_limit()
            self._changed.notify_all()

    def abort(self, failure: Failure) -> None:
        """Make the main thread raise at its next point, or where it waits."""
        with self._changed:
            self._failure = failure
            self._set_limit()
            self._changed.notify_all()

    def _set_limit(self) -> None:
        if self._open or self._failure is not None:
            self._limit = 0
        else:
            self._limit = min(self._due, default=_FAR)
