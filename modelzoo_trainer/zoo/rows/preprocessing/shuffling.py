"""Shuffle rows that do not fit in memory, in two passes.

First, row r is appended to bucket hash(seed, r) % K; then each bucket, which fits in memory, is
permuted and written. Every order is equally likely, and it depends on the seed alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from modelzoo_trainer.zoo.rows.interface import Array, Rows
from modelzoo_trainer.zoo.rows.preprocessing.output import (
    StreamLayout,
    file_name,
    missing_rows,
    naming_folder,
    sync_folder,
    write_rows,
)

BUCKET_BYTES: Final = 1 << 26
MAX_BUCKETS: Final = 512
_FOLDER: Final = "INCOMPLETE.buckets"


def num_buckets(input_bytes: int) -> int:
    """Return K; it depends on the size of the input alone."""
    return min(MAX_BUCKETS, max(1, input_bytes // BUCKET_BYTES))


def hashes(numbers: Array, seed: int) -> Array:
    """Return 64 bits for each number: the output function of SplitMix64.

    Source: G. Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014.
    """
    with np.errstate(over="ignore"):
        mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed += np.uint64(seed % 2**64) * np.uint64(0xD1342543DE82EF95)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def permutation(size: int, seed: int) -> Array:
    """Return a permutation that depends on the size and the seed alone."""
    return np.argsort(hashes(np.arange(size), seed), kind="stable")


class BucketWriter:
    """Writes the rows of a stream in random order.

    Args:
        folder: Of the files.
        layout: Of the rows.
        buckets: K.
        seed: Of the order.
    """

    def __init__(self, folder: Path, layout: StreamLayout, buckets: int, seed: int) -> None:
        self._folder = folder
        self._buckets = folder / _FOLDER
        self._layout = layout
        self._seed = seed
        self.lengths = [0] * buckets
        self.kind: list[Any] = []
        """Name, type and shape of the datasets of a row."""
        self._touched: set[int] = set()

    def restore(self, lengths: list[int], kind: list[Any], *, is_full: bool) -> None:
        """Cut the buckets to the rows that a state counts.

        Args:
            lengths: Rows of each.
            kind: Name, type and shape of the datasets of a row.
            is_full: Whether no rows follow, so that buckets may have become files and be gone.

        Raises:
            ConfigError: If rows are missing.
        """
        self.lengths, self.kind = lengths, kind
        row_bytes = self._row.itemsize if kind else 0
        for number, length in enumerate(lengths):
            path = self._path(number)
            size = path.stat().st_size if path.exists() else 0
            if size > length * row_bytes:
                os.truncate(path, length * row_bytes)
            elif size < length * row_bytes and not is_full:
                raise missing_rows(path)

    def add(self, rows: Rows) -> None:
        """Append rows to their buckets."""
        count = len(rows.lengths)
        if not count:
            return
        stored = self._layout.stored(rows.arrays)
        self.kind = [[name, array.dtype.str, array.shape[1:]] for name, array in stored.items()]
        records = np.empty(count, self._row)
        for name, array in stored.items():
            records[name] = array
        numbers = np.arange(sum(self.lengths), sum(self.lengths) + count)
        chosen = hashes(numbers, self._seed) % np.uint64(len(self.lengths))
        with naming_folder(self._folder):
            self._buckets.mkdir(exist_ok=True)
            for number in np.unique(chosen).tolist():
                inside = records[chosen == number]
                with self._path(number).open("ab") as file:
                    file.write(inside.tobytes())
                self.lengths[number] += len(inside)
                self._touched.add(number)

    def sync(self) -> None:
        """Make the buckets durable."""
        for number in sorted(self._touched):
            sync_folder(self._path(number))
        self._touched.clear()

    def finish(self) -> int:
        """Write the files, except those that are there already, and return their number."""
        number = 0
        for bucket, length in enumerate(self.lengths):
            if not length:
                continue
            count = self._rows_per_file()
            names = [file_name(number + one) for one in range(-(-length // count))]
            number += len(names)
            if not all((self._folder / name).exists() for name in names):
                for name, arrays in zip(names, self._files(bucket, count), strict=True):
                    write_rows(self._folder / name, arrays)
        sync_folder(self._folder)
        return number

    def remove(self) -> None:
        """Remove the buckets."""
        shutil.rmtree(self._buckets, ignore_errors=True)

    @property
    def _row(self) -> np.dtype[Any]:
        return np.dtype([(name, kind, tuple(shape)) for name, kind, shape in self.kind])

    def _rows_per_file(self) -> int:
        one = np.empty(1, self._row)
        return self._layout.rows_per_file({name: one[name] for name in one.dtype.names or ()})

    def _files(self, bucket: int, count: int) -> Iterator[dict[str, Array]]:
        path = self._path(bucket)
        rows = np.fromfile(path, self._row) if path.exists() else np.empty(0, self._row)
        if len(rows) != self.lengths[bucket]:
            raise missing_rows(path)
        order = permutation(len(rows), self._seed + 1 + bucket)
        for start in range(0, len(rows), count):
            chosen = rows[order[start : start + count]]
            yield {name: np.ascontiguousarray(chosen[name]) for name in rows.dtype.names or ()}

    def _path(self, bucket: int) -> Path:
        return self._buckets / f"bucket_{bucket}.bin"
