"""Data for published dataloaders, scaled down.

Tokens are bytes of the text of Python's standard library; images are generated: stripes in a colour
of the class, with noise, and captions that name it; latents: a pattern of the class, with noise.
"""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import published_seq2seq
from benchmarks.published_encoders import (
    CSV_PROCESSORS,
    write_csv,
    write_labels,
    write_masked,
    write_vocabulary,
)
from benchmarks.published_images import has_images, write_images
from benchmarks.published_latents import has_latents, write_latents
from benchmarks.published_multimodal import sees_images, write_captions
from benchmarks.published_preprocessed import write_rows
from benchmarks.published_scaling import BATCH, LABELS, LENGTH, STEPS
from benchmarks.published_tasks import TASK_PROCESSORS, write_task

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
    if _write_other(loader):
        return
    if loader.get("vocab_file"):
        write_vocabulary(Path(loader["vocab_file"]))
    members = loader.get("mixture") or [loader]
    for member in members:
        folders = member["data_dir"]
        for number, folder in enumerate([folders] if isinstance(folders, str) else folders):
            is_task = loader["data_processor"] in TASK_PROCESSORS
            write = _write_task if is_task else _write_folder
            write(Path(folder), loader, number)


def _write_other(loader: dict[str, Any]) -> bool:
    """Write the files of a dataloader of other data than rows of tokens, or return false."""
    if published_seq2seq.is_seq2seq(loader):
        text = _text()
        published_seq2seq.write_text(loader, text[text != END][: _NUM_ROWS * LENGTH].tolist())
        return True
    if sees_images(loader):
        write_captions(loader, _NUM_ROWS, LENGTH)
        return True
    if has_images(loader):
        write_images(Path(loader["data_dir"]), _NUM_ROWS)
        return True
    if has_latents(loader):
        for number, folder in enumerate(loader["data_dir"]):
            write_latents(Path(folder), _NUM_ROWS, number)
        return True
    return False


def _write_task(folder: Path, loader: dict[str, Any], number: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokens = _tokens(number * _NUM_ROWS * LENGTH, _NUM_ROWS * LENGTH)
    write_task(folder, tokens.reshape(-1, LENGTH), loader)


def _write_folder(folder: Path, loader: dict[str, Any], number: int) -> None:
    if "Bert" in loader["data_processor"]:
        _write_encoder_rows(folder, loader, number)
    elif loader.get("max_sequence_length"):
        _write_corpus(folder, number)
    else:
        write_rows(folder, loader, number)


def _write_encoder_rows(folder: Path, loader: dict[str, Any], number: int) -> None:
    """Write CSV or HDF5 files of rows whose tokens are bytes, or made of them."""
    folder.mkdir(parents=True, exist_ok=True)
    processor, per_file = loader["data_processor"], _NUM_ROWS // _NUM_FILES
    firsts = [(number * _NUM_FILES + part) * per_file for part in range(_NUM_FILES)]
    parts = [_tokens(one * LENGTH, per_file * LENGTH).reshape(-1, LENGTH) for one in firsts]
    if processor in CSV_PROCESSORS:
        write_csv(folder, parts, processor)
        write_labels(folder.parent / LABELS)
        return
    for part, rows in enumerate(parts):
        write_masked(folder / f"data_{part}.h5", rows, vsl=bool(loader.get("use_vsl")))


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
    parts: list[NDArray[np.int32]] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_NUM_DOCUMENTS]:
        parts.append(np.frombuffer(path.read_bytes(), np.uint8).astype(np.int32))
        parts.append(np.array([END], np.int32))
    return np.concatenate(parts)
