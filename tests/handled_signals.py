"""Which signals a process handles by itself, as the kernel tells."""

from __future__ import annotations

from pathlib import Path


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler of a signal of its own."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [caught] = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (number - 1) & 1)
