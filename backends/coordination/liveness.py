"""Detect whether other processes are alive."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class StallTimer:
    """Measure how long a value has not changed.

    Only counts time in which this process itself was running: between two looks at most twice
    `interval_s`, the intended interval.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.idle_s = 0.0
        """Seconds since the last change."""
        self._value: Any = None
        self._looked_at: float | None = None

    def look(self, value: Any, now: float | None = None) -> float:
        """Look at the value, and return the seconds for which it has not changed.

        `now`: time of a monotonic clock; None = `time.monotonic`.
        """
        now = time.monotonic() if now is None else now
        if self._looked_at is not None:
            self.idle_s += min(now - self._looked_at, 2 * self.interval_s)
        self._looked_at = now
        spent_s = self.idle_s
        if value != self._value:
            self._value, self.idle_s = value, 0.0
        return spent_s

    def is_stalled(self, value: Any, limit_s: float) -> bool:
        """Look at the value, and return whether it has not changed for too long."""
        self.look(value)
        return self.idle_s > limit_s


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies a process uniquely."""

    host: str | None  # boot and container of the host; None if unknown
    pid: int
    born: str | None  # start time, because pids are reused

    def is_here(self) -> bool:
        """Return whether the process is, or was, on this host."""
        return self.host is not None and self.born is not None and self.host == _host()

    def is_gone(self) -> bool:
        """Return whether the process has ended; False if unknown."""
        if not self.is_here():
            return False
        found = _stat(self.pid)
        return found is None or found[0] in "ZX" or found[1] != self.born

    def is_seen(self) -> bool:
        """Return whether the process is known to exist on this host."""
        return self.is_here() and not self.is_gone()

    def is_stopped(self) -> bool:
        """Return whether the process was stopped by a signal and can be continued."""
        found = _stat(self.pid) if self.is_here() else None
        return found is not None and found[0] == "T" and found[1] == self.born

    def work(self) -> str | None:
        """Return a value that grows while the process uses CPU time; None if unknown."""
        found = _stat(self.pid) if self.is_here() else None
        return found[2] if found is not None else None

    def kill(self) -> None:
        """Kill the process, if it exists on this host."""
        if self.is_seen() and self.pid != os.getpid():
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


def own_identity() -> Identity:
    """Return the identity of this process."""
    return identity_of(os.getpid())


def identity_of(pid: int) -> Identity:
    """Return the identity of a process on this host."""
    found = _stat(pid)
    return Identity(_host(), pid, None if found is None else found[1])


def parent_of(pid: int) -> int | None:
    """Return the parent of a process on this host; None if unknown."""
    found = _stat(pid)
    return None if found is None else int(found[3])


def environment_of(pid: int) -> dict[str, str]:
    """Return the initial environment of a process on this host; empty if unknown."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape")
    except OSError:
        return {}
    return dict(part.split("=", 1) for part in text.split("\0") if "=" in part)


def _host() -> str | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _stat(pid: int) -> tuple[str, str, str, str] | None:
    """Return state, start time, CPU time and parent of a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # from the third on; the name may have spaces
    return fields[0], fields[19], f"{fields[11]} {fields[12]}", fields[1]
