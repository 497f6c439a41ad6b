"""multiprocessing's fork server, made to survive signals sent to the process group.

Its workers end with it, but the run still needs their data during a graceful stop. The server
imports this module first, and installs its own signal handlers.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import sys
from types import FrameType
from typing import Any, Final

_NAMES: Final = ("SIGTERM", "SIGUSR1")  # it already ignores SIGINT


def start_sturdy_server() -> None:
    """Start the server, unless it is running; keep its preload list."""
    server: Any = multiprocessing.forkserver._forkserver
    if __name__ not in server._preload_modules:
        server.set_forkserver_preload([*server._preload_modules, __name__])
    server.ensure_running()


class _Spare:
    """Ignore signals in the process that created it, not in processes forked from it."""

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
