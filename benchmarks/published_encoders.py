"""Rows for the dataloaders of published encoders, scaled down: bytes of the text as tokens."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.published_scaling import LENGTH

_SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_NUM_BYTES: Final = 257  # and the end of a document
_FIRST, _NUM_KINDS, _MASK = 4, 28, 32  # of the smallest published vocabulary, of 33 tokens
_MASKED_EVERY: Final = 7
_NUM_SENTENCES: Final = 4  # of a document
SIGNS: Final = range(33, 65)
_LETTERS: Final = range(97, 123)
_LABELS: Final = {"O": 0, "NAME": 1}

Ints = NDArray[np.int32]


def write_vocabulary(path: Path) -> None:
    """Write a file of tokens: the special ones, then one for each byte."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*_SPECIAL, *map(_token, range(_NUM_BYTES))]) + "\n")


def write_labels(path: Path) -> None:
    """Write a file of the labels of tokens: letters are names, all else is not."""
    path.write_text(json.dumps(_LABELS))


def write_masked(path: Path, rows: Ints, *, vsl: bool) -> None:
    """Write an HDF5 file of rows (N, T) with every seventh token hidden."""
    import h5py

    inputs, labels = _masked(rows)
    mask = np.ones_like(inputs)
    features = [inputs, mask]
    if vsl:  # two documents
        first = LENGTH // 3
        sizes = (first, LENGTH - first)
        spans = np.concatenate([np.arange(size)[::-1] for size in sizes])
        positions = np.concatenate([np.arange(size) for size in sizes])
        features += [np.broadcast_to(one, inputs.shape) for one in (spans, positions)]
    with h5py.File(path, "w") as file:
        for name, data in (("data", np.stack(features, axis=1)), ("labels", labels[:, None])):
            chunk = (1, *data.shape[1:])
            file.create_dataset(name, data=data.astype(np.int32), chunks=chunk, compression="gzip")
        file.attrs["n_examples"] = len(rows)


def write_csv(folder: Path, parts: Sequence[Ints], processor: str) -> None:
    """Write CSV files of rows (N, T), and the list of them."""
    lines = []
    for number, rows in enumerate(parts):
        name = f"data_{number}.csv"
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            cells = list(_ROWS[processor](rows))
            writer = csv.DictWriter(file, list(cells[0]))
            writer.writeheader()
            writer.writerows(cells)
        lines.append(f"{name} {len(rows)}\n")
    (folder / "meta.dat").write_text("".join(lines))


def _masked(rows: Ints) -> tuple[Ints, Ints]:
    """Return rows with every seventh token hidden, and their labels."""
    tokens = (rows % _NUM_KINDS + _FIRST).astype(np.int32)
    places = np.arange(rows.shape[1])[None] + np.arange(len(rows))[:, None]
    is_masked = places % _MASKED_EVERY == 0
    return np.where(is_masked, _MASK, tokens), np.where(is_masked, tokens, -100)


def _of_masked(rows: Ints) -> Iterator[dict[str, Any]]:
    for inputs, labels in zip(*_masked(rows), strict=True):
        yield {
            "input_ids": inputs.tolist(),
            "attention_mask": [1] * len(inputs),
            "labels": labels.tolist(),
        }


def _of_pairs(rows: Ints) -> Iterator[dict[str, Any]]:
    """Yield pairs of sentences, of which every second one is of two places of the text."""
    half = (LENGTH - 3) // 2
    for number, row in enumerate(rows):
        is_random = number % 2
        second = rows[(number * 7 + 5) % len(rows)] if is_random else row
        sentences = [tokens_of(row[:half]), tokens_of(second[half : 2 * half])]
        yield {
            "tokens": ["[CLS]", *sentences[0], "[SEP]", *sentences[1], "[SEP]"],
            "segment_ids": [0] * (half + 2) + [1] * (half + 1),
            "is_random_next": is_random,
        }


def _of_documents(rows: Ints) -> Iterator[dict[str, Any]]:
    """Yield documents of four sentences; those that begin with a digit or a sign are the summary.

    That is one in nine: their share is learned within the 20 steps, which ones they are later.
    """
    size = LENGTH // _NUM_SENTENCES
    for row in rows:
        ids = row.astype(np.int64) + len(_SPECIAL)
        starts = np.arange(0, LENGTH, size)
        labels = np.isin(row[starts + 1], list(SIGNS)).astype(int)
        ids[starts] = _SPECIAL.index("[CLS]")
        yield {
            "head": ids.tolist(),
            "labels": labels.tolist(),
            "segments": (np.arange(LENGTH) // size % 2).tolist(),
            "starts": starts.tolist(),
        }


def _of_names(rows: Ints) -> Iterator[dict[str, Any]]:
    names = np.where(np.isin(rows, list(_LETTERS)), "NAME", "O")
    for row, labels in zip(rows, names, strict=True):
        yield {"tokens": " ".join(tokens_of(row)), "labels": " ".join(labels.tolist())}


def tokens_of(row: Ints) -> list[str]:
    """Return the tokens of bytes."""
    return [_token(one) for one in row.tolist()]


def _token(byte: int) -> str:
    return f"b{byte}"


_ROWS: Final = {
    "BertCSVDataProcessor": _of_masked,
    "BertCSVDynamicMaskDataProcessor": _of_pairs,
    "BertSumCSVDataProcessor": _of_documents,
    "BertTokenClassifierDataProcessor": _of_names,
}
CSV_PROCESSORS: Final = tuple(_ROWS)
