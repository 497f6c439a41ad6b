"""Data for published dataloaders, scaled down: bytes of the text of Python's standard library."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import published_seq2seq
from benchmarks.published_preprocessed import write_rows
from benchmarks.published_scaling import BATCH, LENGTH, STEPS

END: Final = 256
"""The token at the end of a document; the others are bytes."""

_NUM_ROWS: Final = (STEPS + 5) * BATCH
_NUM_FILES: Final = 2
_NUM_DOCUMENTS: Final = 60


def write_data(loader: dict[str, Any]) -> None:
    """Write the files that a scaled dataloader reads.

    Args:
        loader: Its settings: `data_processor`, `data_dir` or `mixture`, and the format.
    """
    if published_seq2seq.is_seq2seq(loader):
        text = _text()
        published_seq2seq.write_text(loader, text[text != END][: _NUM_ROWS * LENGTH].tolist())
        return
    members = loader.get("mixture") or [loader]
    for member in members:
        folders = member["data_dir"]
        for number, folder in enumerate([folders] if isinstance(folders, str) else folders):
            _write_folder(Path(folder), loader, number)


def _write_folder(folder: Path, loader: dict[str, Any], number: int) -> None:
    if loader.get("max_sequence_length"):
        _write_corpus(folder, number)
    else:
        write_rows(folder, loader, number)


def _write_corpus(folder: Path, number: int) -> None:
    """Write a stream of tokens, which is cut where it is read."""
    import h5py

    folder.mkdir(parents=True, exist_ok=True)
    for part in range(_NUM_FILES):
        start = (number * _NUM_FILES + part) * _NUM_ROWS // _NUM_FILES
        with h5py.File(folder / f"data_{part}.h5", "w") as file:
            num = _NUM_ROWS // _NUM_FILES * LENGTH + 1
            file["data"] = _tokens(start * LENGTH, num).astype(np.uint16)


def _tokens(start: int, num: int) -> NDArray[np.int32]:
    """Return tokens of the text, from the beginning again after its end."""
    text = _text()
    return np.take(text, np.arange(start, start + num), mode="wrap")


@cache
def _text() -> NDArray[np.int32]:
    parts = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_NUM_DOCUMENTS]:
        parts += [np.frombuffer(path.read_bytes(), np.uint8).astype(np.int32), [END]]
    return np.concatenate(parts).astype(np.int32)
