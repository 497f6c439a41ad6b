"""Folders with HDF5 files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.data.hdf5.written import write


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., str]:
    """Write rows into a folder, in files of the given numbers of rows; return its path."""

    def make(rows: Any, sizes: Sequence[int] | None = None, name: str = "a", **options: Any) -> str:
        begin = 0
        for number, size in enumerate(sizes or [len(rows)]):
            write(tmp_path / name / f"f{number:03}.h5", rows[begin : begin + size], **options)
            begin += size
        return str(tmp_path / name)

    return make
