"""The project's own environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

LIMIT_BATCHES: Final = "MODELZOO_LIMIT_BATCHES"


def limit_batches(environ: Mapping[str, str] | None = None) -> int | None:
    """Return after how many batches passes over data end; None = with the data.

    Args:
        environ: Another environment than the one of this process.

    Raises:
        ValueError: If it is no number > 0, nor "none" or empty.
    """
    text = (os.environ if environ is None else environ).get(LIMIT_BATCHES, "").strip()
    if text.lower() in ("", "none"):
        return None
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ValueError(f"{text!r} is not a whole number > 0, or 'none' for no limit.")
    return int(text)
