"""Files of rows whose token ids tell their numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

LENGTH = 8


def samples(num: int, *, features: int = 3, length: int = LENGTH) -> np.ndarray[Any, Any]:
    """Return rows of the Sample format; row i begins with token i."""
    tokens = np.arange(num)[:, None] + np.arange(length + 1)
    rows = np.ones((num, features, length), np.int32)
    rows[:, 0] = tokens[:, :-1]
    if features > 2:
        rows[:, 2] = tokens[:, 1:]
    if features == 5:
        rows[:, 3], rows[:, 4] = np.arange(length)[::-1], np.arange(length)
    return rows


def write(path: Path, rows: Any, *, dataset: str = "data", **options: Any) -> None:
    """Write a file as the preprocessing does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if rows.ndim > 1 and "chunks" not in options:
        options = {"chunks": (1, *rows.shape[1:]), "compression": "gzip", **options}
    with h5py.File(path, "w") as file:
        file.create_dataset(dataset, data=rows, **options)
        if rows.ndim > 1:
            file.attrs["n_examples"] = len(rows)


def flat(lists: Any) -> list[Any]:
    """Return lists as one."""
    return [one for inner in lists for one in inner]


def firsts(loader: Any) -> list[list[int]]:
    """Return the first token of each sample, by batch."""
    return [batch["input_ids"][:, 0].tolist() for batch in loader]
