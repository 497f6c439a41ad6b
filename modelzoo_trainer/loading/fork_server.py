"""multiprocessing's fork server, which outlives signals that a whole group of processes gets.

Its workers end when it does, and the run still needs their data when it is asked to stop. The
server imports this module before anything else, and takes the signals over.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import sys
from types import FrameType
from typing import Any, Final

_NAMES: Final = ("SIGTERM", "SIGUSR1")  # SIGINT it disregards by itself


def start_sturdy_server() -> None:
    """Start the server, unless there is one already; it keeps what others want it to import."""
    server: Any = multiprocessing.forkserver._forkserver
    if __name__ not in server._preload_modules:
        server.set_forkserver_preload([*server._preload_modules, __name__])
    server.ensure_running()


class _Spare:
    """Disregards signals in the process that made it, not in those that it forks."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    for _name in _NAMES:
        signal.signal(getattr(signal, _name), _Spare())
