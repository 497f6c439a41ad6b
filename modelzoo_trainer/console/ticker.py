"""A thread that looks at a run now and then, and does no harm to processes that are forked."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Final

_PATIENCE_S: Final = 1.0  # of a fork, and of the end, for a drawing that a stuck terminal holds up


class _Drawing:
    """The lock under which the console is drawn: nobody forks meanwhile.

    A worker that was forked while another thread held a lock of logging, of tqdm or of a stream
    would wait for it for ever.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._held_by_fork = False
        self._is_registered = False

    def guard_forks(self) -> None:
        """Have forks wait for the end of a drawing. Idempotent."""
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
    """Draw on the console inside: one thread at a time, and no process is forked meanwhile."""
    with _DRAWING.lock:
        yield


class Ticker:
    """Calls a function periodically in its own thread until it is stopped or fails.

    `tick`: called while no process is forked.
    """

    def __init__(self, tick: Callable[[], None], interval_s: float) -> None:
        self._tick = tick
        self._interval_s = interval_s
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin."""
        _DRAWING.guard_forks()
        thread = threading.Thread(target=self._run, name="progress", daemon=True)
        thread.start()
        self._thread = thread  # not if it cannot be started

    def stop(self) -> None:
        """End, and wait for a tick that is under way. Idempotent."""
        self._is_over.set()
        thread, self._thread = self._thread, None
        if thread is not None and os.getpid() == self._pid:
            thread.join(_PATIENCE_S)

    def _run(self) -> None:
        while not self._is_over.wait(self._interval_s):
            with drawing():
                if self._is_over.is_set():
                    return
                # A console that is gone, or a run whose state is halfway through a change: the run
                # must not suffer.
                with contextlib.suppress(Exception):
                    self._tick()
