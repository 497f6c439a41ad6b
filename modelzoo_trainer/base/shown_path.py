"""Paths as messages show them."""

from __future__ import annotations

import os
from pathlib import Path


def shown_path(path: str | Path) -> str:
    """Return a path relative to the working folder if it is below it, else as given."""
    try:
        inside = Path(os.path.abspath(path)).relative_to(os.path.abspath(""))
    except (OSError, ValueError):  # elsewhere, or the working folder was removed
        return str(path)
    return str(inside)
