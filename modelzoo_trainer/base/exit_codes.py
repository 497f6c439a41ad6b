"""Exit codes of the commands, and the signals that stop a run."""

from __future__ import annotations

import signal
from typing import Final

DONE: Final = 0
FAILED: Final = 1
WRONG_USE: Final = 2
INTERRUPTED: Final = 130  # 128 + signal number, as in shells
PREEMPTED: Final = 143

STOP_SIGNALS: Final = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1")
    if hasattr(signal, name)  # SIGUSR1 does not exist on every system
)


def exit_code(interruption: str) -> int:
    """Return the exit code of a run that a signal ("SIGINT"), a stop file or `max_time` stopped."""
    return INTERRUPTED if interruption == "SIGINT" else PREEMPTED
