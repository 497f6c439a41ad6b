"""Rows for published dataloaders, scaled down: bytes of the text of Python's standard library."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.published_encoders import (
    CSV_PROCESSORS,
    write_csv,
    write_masked,
    write_vocabulary,
)
from benchmarks.published_scaling import BATCH, LENGTH, STEPS
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
    if loader.get("vocab_file"):
        write_vocabulary(Path(loader["vocab_file"]))
    members = loader.get("mixture") or [loader]
    for member in members:
        folders = member["data_dir"]
        for number, folder in enumerate([folders] if isinstance(folders, str) else folders):
            is_task = loader["data_processor"] in TASK_PROCESSORS
            write = _write_task if is_task else _write_folder
            write(Path(folder), loader, number)


def _write_task(folder: Path, loader: dict[str, Any], number: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokens = _tokens(number * _NUM_ROWS * LENGTH, _NUM_ROWS * LENGTH)
    write_task(folder, tokens.reshape(-1, LENGTH), loader)


def _write_folder(folder: Path, loader: dict[str, Any], number: int) -> None:
    import h5py

    folder.mkdir(parents=True, exist_ok=True)
    processor, per_file = loader["data_processor"], _NUM_ROWS // _NUM_FILES
    if processor in CSV_PROCESSORS or "Bert" in processor:
        firsts = [(number * _NUM_FILES + part) * per_file for part in range(_NUM_FILES)]
        parts = [_tokens(one * LENGTH, per_file * LENGTH).reshape(-1, LENGTH) for one in firsts]
        if processor in CSV_PROCESSORS:
            write_csv(folder, parts, processor)
        else:
            for part, rows in enumerate(parts):
                vsl = bool(loader.get("use_vsl"))
                write_masked(folder / f"data_{part}.h5", rows, vsl=vsl)
        return
    for part in range(_NUM_FILES):
        start = (number * _NUM_FILES + part) * _NUM_ROWS // _NUM_FILES
        with h5py.File(folder / f"data_{part}.h5", "w") as file:
            if loader.get("max_sequence_length"):  # a stream of tokens, cut where it is read
                num = _NUM_ROWS // _NUM_FILES * LENGTH + 1
                file["data"] = _tokens(start * LENGTH, num).astype(np.uint16)
                continue
            rows = _rows(loader, start, _NUM_ROWS // _NUM_FILES)
            chunk = (1, *rows.shape[1:])
            file.create_dataset("data", data=rows, chunks=chunk, compression="gzip")
            file.attrs["n_examples"] = len(rows)


def _rows(loader: dict[str, Any], start: int, num: int) -> NDArray[np.int32]:
    """Return `num` rows from row `start` of the text on: (num, features, LENGTH)."""
    tokens = _tokens(start * LENGTH, num * LENGTH + 1)
    inputs = tokens[:-1].reshape(num, LENGTH)
    labels = tokens[1:].reshape(num, LENGTH)
    mask = np.ones_like(inputs)
    if "Dpo" in loader["data_processor"]:
        return _pairs(inputs, labels, mask)
    features = [inputs, mask, labels]
    if loader.get("use_vsl"):
        features += _documents(num)
    return np.stack(features, axis=1).astype(np.int32)


def _pairs(inputs: Any, labels: Any, mask: Any) -> NDArray[np.int32]:
    """Return rows whose second answer is the first one backwards; prompts are not counted."""
    prompt = LENGTH // 4
    worse, worse_labels = inputs.copy(), labels.copy()
    worse[:, prompt:] = inputs[:, prompt:][:, ::-1]
    worse_labels[:, prompt - 1 : -1] = worse[:, prompt:]
    targets = [
        np.where(np.arange(LENGTH) < prompt - 1, -100, one) for one in (labels, worse_labels)
    ]
    features = [inputs, mask, targets[0], worse, mask, targets[1]]
    return np.stack(features, axis=1).astype(np.int32)


def _documents(num: int) -> list[NDArray[np.int32]]:
    """Return attention spans and position ids of rows of two documents each."""
    lengths = (LENGTH // 3, LENGTH - LENGTH // 3)
    positions = np.concatenate([np.arange(length) for length in lengths])
    spans = np.concatenate([np.arange(length)[::-1] for length in lengths])
    return [np.broadcast_to(one, (num, LENGTH)).astype(np.int32) for one in (spans, positions)]


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
