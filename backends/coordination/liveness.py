"""Whether other processes are alive."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class StallTimer:
    """Measures how long something has not changed.

    Only time in which this process itself was at work counts: between two looks at most twice
    `interval_s`, the time that is meant to lie between them.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.idle_s = 0.0
        """Seconds since the last change."""
        self._value: Any = None
        self._looked_at: float | None = None

    def look(self, value: Any, now: float | None = None) -> float:
        """Look at the value, and return for how many seconds it was the same until this look.

        `now` is the time on a clock that never goes back; None = `time.monotonic`.
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
        """Look at the value, and return whether it has been the same for too long."""
        self.look(value)
        return self.idle_s > limit_s


@dataclass(frozen=True, slots=True)
class Identity:
    """A process, so that no other one is taken for it."""

    host: str | None  # and when that was started, and the container; None if it is not known
    pid: int
    born: str | None  # when it was started; numbers are used again

    def is_here(self) -> bool:
        """Return whether the process is, or was, one of this host."""
        return self.host is not None and self.born is not None and self.host == _host()

    def is_gone(self) -> bool:
        """Return whether the process has ended; False if that is not known."""
        if not self.is_here():
            return False
        found = _stat(self.pid)
        return found is None or found[0] in "ZX" or found[1] != self.born

    def is_seen(self) -> bool:
        """Return whether the process is known to be there: one of this host that has not ended."""
        return self.is_here() and not self.is_gone()

    def is_stopped(self) -> bool:
        """Return whether the process was stopped by a signal, so that it can be continued."""
        found = _stat(self.pid) if self.is_here() else None
        return found is not None and found[0] == "T" and found[1] == self.born

    def work(self) -> str | None:
        """Return what grows while the process does something; None if that is not known."""
        found = _stat(self.pid) if self.is_here() else None
        return found[2] if found is not None else None

    def kill(self) -> None:
        """Kill the process, if it is one of this host and still there."""
        if self.is_seen() and self.pid != os.getpid():
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


def own_identity() -> Identity:
    """Return the identity of this process."""
    return identity_of(os.getpid())


def identity_of(pid: int) -> Identity:
    """Return the identity of a process of this host."""
    found = _stat(pid)
    return Identity(_host(), pid, None if found is None else found[1])


def parent_of(pid: int) -> int | None:
    """Return the parent of a process of this host; None if that is not known."""
    found = _stat(pid)
    return None if found is None else int(found[3])


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a program of this host was started with; empty = not known."""
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
    """Return state, time of start, time at work, and parent of a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # from the third on; the name may have spaces
    return fields[0], fields[19], f"{fields[11]} {fields[12]}", fields[1]
