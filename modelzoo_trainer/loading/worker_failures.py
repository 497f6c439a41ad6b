"""A loader's worker that dies is an error where data is awaited, and nowhere else.

torch reports it from a handler of SIGCHLD, which may run between any two lines: within a save, or
while what failed is being put in order. The report is kept until the next fetch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Final

from torch.utils.data._utils import signal_handling as torch_signals


class _Reports:
    """torch's handler of SIGCHLD; what it raises is kept while nobody waits for data.

    It is a context: of code that waits for data.
    """

    def __init__(self) -> None:
        self._num_waiting = 0
        self._kept: list[RuntimeError] = []
        self._handler: Callable[[int, FrameType | None], Any] | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle SIGCHLD."""
        if self._handler is None:
            return
        try:
            self._handler(signum, frame)
        except RuntimeError as error:
            if self._num_waiting:
                raise
            self._kept.append(error.with_traceback(None))

    def replace_torchs(self) -> None:
        """Take the place of torch's handler; only the main thread can."""
        if not _is_main_thread() or not hasattr(signal, "SIGCHLD"):
            return
        torch_signals._set_SIGCHLD_handler()
        current = signal.getsignal(signal.SIGCHLD)
        if getattr(current, "__module__", None) == torch_signals.__name__ and callable(current):
            self._handler = current
            signal.signal(signal.SIGCHLD, self)

    def __enter__(self) -> None:
        """Let the handler raise."""
        self._num_waiting += _is_main_thread()  # where handlers run

    def __exit__(self, *exc_info: object) -> None:
        """Have the handler keep what it has to raise."""
        self._num_waiting -= _is_main_thread()

    def give(self) -> None:
        """Raise what was kept, if anything was."""
        if self._kept:
            raise self._kept.pop(0)

    def forget(self, workers: Iterable[Any]) -> str | None:
        """Drop what was kept about some workers, and return it."""
        names = [f"(pid {worker.pid})" for worker in workers]  # as torch's messages have them
        told = [error for error in self._kept if any(name in str(error) for name in names)]
        self._kept = [error for error in self._kept if error not in told]
        return str(told[0]) if told else None


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


REPORTS: Final = _Reports()
