"""Decisions that all processes take at the same point of their programs, without collectives.

A proposal is written to the board, where everybody reads it. From then on no main thread leaves its
next point, and each process answers with the point that its main thread is at. The last one to
answer commits the decision to the first point that nobody has come to:

    board      ... | propose "save" | commit "save" at 8 | ...
    process 0  point 6 -- answers 6 -- waits in 7 -- 7 returns () -- 8 returns ("save",)
    process 1  point 7 -- answers 7 -- waits in 8 ------------------ 8 returns ("save",)

Only threads answer, so no main thread has to move for another one to be let go.
"""

from __future__ import annotations

import threading
from typing import Final

from .failures import Failure, RunFailed

_FAR: Final = 1 << 62


class Decisions:
    """The decision points of this process's main thread."""

    def __init__(self) -> None:
        self._point = 0
        self._limit = _FAR  # the next point that is not just passed
        self._open: set[int] = set()
        self._due: dict[int, list[tuple[int, str]]] = {}
        self._failure: Failure | None = None
        self._changed = threading.Condition()

    @property
    def point(self) -> int:
        """The number of the last point that the main thread has come to."""
        return self._point

    def decided(self) -> tuple[str, ...]:
        """Come to the next point, and return the topics that are decided to begin here.

        Raises:
            RunFailed: If the run has failed.

        Cost:
            Two comparisons; waits for the others while a decision is being made.
        """
        # `hold` sets the limit before it reads the point; here it is the other way round. So
        # either the answer has this point, or this call sees the limit.
        self._point = point = self._point + 1
        if point < self._limit:
            return ()
        return self._settled(point)

    def _settled(self, point: int) -> tuple[str, ...]:
        with self._changed:
            while self._open and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                raise RunFailed(self._failure)
            topics = self._due.pop(point, [])
            self._set_limit()
        return tuple(dict.fromkeys(topic for _, topic in sorted(topics)))

    def hold(self, number: int) -> int:
        """Let the main thread wait at its next point; return the one that it has come to.

        Args:
            number: Of the proposal.
        """
        with self._changed:
            self._open.add(number)
            self._set_limit()
            return self._point

    def commit(self, number: int, topic: str, point: int) -> None:
        """Let the main thread go on; it returns the topic at the point.

        Args:
            number: Of the proposal; nothing happens if that is not open.
            topic: What was proposed.
            point: That no process has come to yet.
        """
        with self._changed:
            if number in self._open:
                self._open.remove(number)
                self._due.setdefault(point, []).append((number, topic))
                self._set_limit()
                self._changed.notify_all()

    def drop(self) -> None:
        """Forget the proposals that are open: a process has come to its last point."""
        with self._changed:
            self._open.clear()
            self._set_limit()
            self._changed.notify_all()

    def abort(self, failure: Failure) -> None:
        """Let the main thread raise at its next point, or where it waits."""
        with self._changed:
            self._failure = failure
            self._set_limit()
            self._changed.notify_all()

    def _set_limit(self) -> None:
        if self._open or self._failure is not None:
            self._limit = 0
        else:
            self._limit = min(self._due, default=_FAR)
