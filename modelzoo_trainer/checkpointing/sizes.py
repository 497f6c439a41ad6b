"""Numbers of bytes for a reader."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ("kB", "MB", "GB", "TB", "PB")


def readable(num_bytes: int) -> str:
    """Return a number of bytes with a unit, such as "12.3 MB"."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    power = 1
    while num_bytes / 1000**power >= 999.95 and power < len(_UNITS):
        power += 1
    return f"{num_bytes / 1000**power:.1f} {_UNITS[power - 1]}"
