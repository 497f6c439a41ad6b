"""A loader's worker that dies is an error where its data is awaited, and nowhere else.

torch reports it from a handler of SIGCHLD, which may run between any two lines: within a save, or
while the workers of another loader are being started. The report is kept until the next fetch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from torch.utils.data._utils import signal_handling as torch_signals


class _Reports:
    """torch's handler of SIGCHLD; what it raises is kept while nobody waits for workers."""

    def __init__(self) -> None:
        self._is_awaited = False
        self._kept: list[RuntimeError] = []
        self._handler: Callable[[int, FrameType | None], Any] | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle SIGCHLD."""
        if self._handler is None:
            return
        try:
            self._handler(signum, frame)
        except RuntimeError as error:
            if self._is_awaited:
                raise
            self._kept.append(error.with_traceback(None))

    def put_off(self) -> None:
        """Take the place of torch's handler; only the main thread can."""
        if not _is_main_thread() or not hasattr(signal, "SIGCHLD"):
            return
        torch_signals._set_SIGCHLD_handler()
        current = signal.getsignal(signal.SIGCHLD)
        if getattr(current, "__module__", None) == torch_signals.__name__ and callable(current):
            self._handler = current
            signal.signal(signal.SIGCHLD, self)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Raise what is reported within."""
        self._is_awaited = _is_main_thread()  # handlers run there
        try:
            yield
        finally:
            self._is_awaited = False

    def take(self, workers: Iterable[Any]) -> RuntimeError | None:
        """Return what was kept about some workers, and forget it."""
        if not self._kept:
            return None
        names = [f"(pid {worker.pid})" for worker in workers]  # as torch's messages have them
        for error in self._kept:
            if any(name in str(error) for name in names):
                self._kept.remove(error)
                return error
        return None


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


REPORTS: Final = _Reports()
