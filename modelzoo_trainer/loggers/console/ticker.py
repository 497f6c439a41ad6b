"""A periodic thread that is safe with forks."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Final

_PATIENCE_S: Final = 1.0  # seconds to wait for a drawing on a blocked terminal


class _Drawing:
    """The lock of drawing on the console, which also delays forks.

    A worker forked while another thread holds a lock of logging, tqdm or a stream would deadlock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._held_by_fork = False
        self._is_registered = False

    def guard_forks(self) -> None:
        """Make forks wait for the end of a drawing. Idempotent."""
        if not self._is_registered and hasattr(os, "register_at_fork"):
            self._is_registered = True
            os.register_at_fork(
                before=self._before, after_in_parent=self._release, after_in_child=self._renew
            )

    def _before(self) -> None:
        self._held_by_fork = self.lock.acquire(timeout=_PATIENCE_S)

    def _release(self) -> None:
        if self._held_by_fork:
            self._held_by_fork = False
            self.lock.release()

    def _renew(self) -> None:
        self._held_by_fork = False
        self.lock = threading.RLock()


_DRAWING: Final = _Drawing()


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Allow drawing on the console inside: one thread at a time, and no forks."""
    with _DRAWING.lock:
        yield


class Ticker:
    """Calls a function periodically in its own thread until it is stopped or fails.

    `tick`: never called during a fork.
    """

    def __init__(self, tick: Callable[[], None], interval_s: float) -> None:
        self._tick = tick
        self._interval_s = interval_s
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the thread."""
        _DRAWING.guard_forks()
        thread = threading.Thread(target=self._run, name="progress", daemon=True)
        thread.start()
        self._thread = thread  # not if it cannot be started

    def stop(self) -> None:
        """Stop the thread, and wait for a pending tick. Idempotent."""
        self._is_over.set()
        thread, self._thread = self._thread, None
        if thread is not None and os.getpid() == self._pid:
            thread.join(_PATIENCE_S)

    def _run(self) -> None:
        while not self._is_over.wait(self._interval_s):
            with drawing():
                if self._is_over.is_set():
                    return
                # A closed console or an inconsistent state must not affect the run.
                with contextlib.suppress(Exception):
                    self._tick()
