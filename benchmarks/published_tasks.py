"""Data for published dataloaders of sentences with classes, and of questions with answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.published_encoders import SIGNS, Ints, tokens_of
from benchmarks.published_scaling import LENGTH

_LABELS: Final = ("entailment", "neutral", "contradiction")
_NUM_CONTEXTS: Final = 2  # of a question
_QUESTION: Final = LENGTH // 4  # tokens


def write_task(folder: Path, rows: Ints, loader: dict[str, Any]) -> None:
    """Write the files that a dataloader reads, of rows (N, T) of the text.

    `loader`: its settings; `data_processor` is one of `TASK_PROCESSORS`.
    """
    if loader["data_processor"] not in _TASKS:
        _write_questions(folder / "data.h5", rows)
        return
    make, names = _TASKS[loader["data_processor"]]
    names = ("train",) if loader["is_training"] else names
    for part, name in zip(np.array_split(rows, len(names)), names, strict=True):
        lines = ["\t".join(one) for one in make(part)]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")


def _write_questions(path: Path, rows: Ints) -> None:
    """Write the first tokens of each row as a question, the others and those of a row before it."""
    import h5py

    others = [np.roll(rows, shift, axis=0)[:, _QUESTION:] for shift in range(_NUM_CONTEXTS)]
    with h5py.File(path, "w") as file:
        for name, ids in (("data_0", rows[:, :_QUESTION]), ("data_1", np.stack(others, axis=1))):
            features = [ids, np.ones_like(ids), np.zeros_like(ids)]
            file[name] = np.stack(features, axis=1).astype(np.int32)
        file.attrs["n_examples"] = len(rows)


def _sentences(rows: Ints) -> Iterator[Sequence[str]]:
    """Yield the header, then sentences, of which those that begin with a sign are positive."""
    yield "sentence", "label"
    for row in rows:
        yield " ".join(tokens_of(row)), str(int(row[0] in SIGNS))


def _pairs(rows: Ints) -> Iterator[Sequence[str]]:
    """Yield the header, then pairs with the label of how many of them begin with a sign."""
    yield "index", "sentence1", "sentence2", "gold_label"
    for number, row in enumerate(rows):
        halves = np.array_split(row, 2)
        label = _LABELS[sum(int(half[0]) in SIGNS for half in halves)]
        yield str(number), *(" ".join(tokens_of(half)) for half in halves), label


_TASKS: Final = {
    "SST2DataProcessor": (_sentences, ("dev",)),
    "MNLIDataProcessor": (_pairs, ("dev_matched", "dev_mismatched")),
}
TASK_PROCESSORS: Final = (*_TASKS, "DPRHDF5DataProcessor")
