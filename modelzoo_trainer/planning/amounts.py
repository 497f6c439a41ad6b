"""Amounts as a reader writes and reads them."""

from __future__ import annotations

import re
from typing import Final

from modelzoo_trainer.errors import ConfigError

_UNITS: Final = {"": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(i?)B)?\s*", re.IGNORECASE | re.ASCII)
_LETTERS: Final = ("", "k", "M", "G", "T", "P", "E")


def bytes_of(text: str) -> int:
    """Return a size of memory in bytes.

    Args:
        text: Such as "80GiB", "141GB" or a number of bytes.

    Raises:
        ConfigError: If it is no size > 0.
    """
    found = _SIZE.fullmatch(text)
    size = 0.0
    if found is not None:
        letter = (found[2] or "").upper()
        base = 1024 if found[3] else 1000
        size = float(found[1]) * (base ** _UNITS[letter] if letter else 1)
    if size < 1:
        raise ConfigError(
            f"--memory is {text!r}; it must be a size such as 80GiB, 141GB or 16000000000."
        )
    return int(size)


def in_bytes(num: int) -> str:
    """Return a number of bytes with a unit, such as "12.3 GiB"."""
    value, power = float(num), 0
    while value >= 1023.95 and power < 5:
        value, power = value / 1024, power + 1
    return f"{num} B" if not power else f"{value:.1f} {'KMGTP'[power - 1]}iB"


def in_thousands(num: float, unit: str = "") -> str:
    """Return a number with a letter for its thousands, such as "6.7 G" or "6.7 GFLOP"."""
    power = 0
    while num >= 999.95 and power < 6:
        num, power = num / 1000, power + 1
    digits = f"{num:.0f}" if not power else f"{num:.1f}"
    return f"{digits} {_LETTERS[power]}{unit}".rstrip()
