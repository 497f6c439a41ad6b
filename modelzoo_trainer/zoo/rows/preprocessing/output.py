"""Write rows to HDF5 files, each at once: a file under its name is complete."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.zoo.rows.hdf5_format import COUNT, DATASET, MASK, SUFFIX
from modelzoo_trainer.zoo.rows.interface import Array, Rows

PART: Final = ".part"
"""Ending of a file that is being written."""
_GZIP_LEVEL: Final = 1  # with the shuffle filter it is smaller and faster than level 4 without


def file_name(number: int) -> str:
    """Return the name of an output file."""
    return f"output_chunk_0_{number}{SUFFIX}"


def h5py() -> Any:
    """Return the library.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        return import_module("h5py")
    except ImportError as error:
        raise ConfigError(
            "data_preprocess requires h5py, which is not installed: "
            'pip install "modelzoo-trainer[preprocess]"'
        ) from error


def missing_rows(path: Path) -> ConfigError:
    """Return the error that rows of an unfinished run are gone."""
    return ConfigError(
        f"setup.output_dir: {str(path)!r} has been removed or cut since the run was interrupted. "
        "Restore it, or remove the folder to start again."
    )


def write_rows(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write a file durably: under another name, then renamed.

    Args:
        path: The file; an older one is replaced.
        arrays: By name of the dataset; the first dimension is the row.
    """
    _replace(path, _image(arrays))


def _image(arrays: Mapping[str, Array]) -> bytes:
    """Return the content of a file.

    It is made in memory: the library loses errors of the disk when it closes a file.
    """
    with h5py().File("rows", "w", driver="core", backing_store=False) as file:
        for name, rows in arrays.items():
            file.attrs[COUNT] = len(rows)
            file.create_dataset(
                name,
                data=rows,
                chunks=(1, *rows.shape[1:]),
                compression="gzip",
                compression_opts=_GZIP_LEVEL,
                shuffle=True,
                track_times=False,
            )
        file.flush()
        return bytes(file.id.get_file_image())


def write_text(path: Path, text: str) -> None:
    """Write a text file durably: under another name, then renamed."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file durably: under another name, then renamed."""
    _replace(path, content)
    sync_folder(path.parent)


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + PART)
    with naming_folder(path.parent):
        with part.open("wb") as file:
            file.write(content)
        _sync(part)
        part.replace(path)


@contextmanager
def naming_folder(folder: Path) -> Iterator[None]:
    """Context manager: an error of the disk names the folder."""
    try:
        yield
    except OSError as error:
        named = OSError(error.errno, reason_of(error), str(folder))
        named.add_note("correct that, then run the same command again to continue")
        raise named from error


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLayout:
    """How the rows of a stream are stored."""

    features: Sequence[str]
    dtype: str
    inverts_mask: bool
    bytes_per_file: int

    def stored(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return arrays as they are in the file."""
        stored = dict(arrays)
        if DATASET in stored:
            data = stored[DATASET].astype(self.dtype)
            if self.inverts_mask:
                data[:, self.masks] = 1 - data[:, self.masks]
            stored[DATASET] = data
        return stored

    @property
    def masks(self) -> list[int]:
        """Indices of the features that are masks: a pair of answers has two."""
        names = enumerate(self.features)
        return [index for index, name in names if name.endswith(MASK)]

    def rows_per_file(self, arrays: Mapping[str, Array]) -> int:
        """Return the number of rows of a file, the same for all but the last."""
        row_bytes = sum(rows[:1].nbytes for rows in arrays.values())
        return max(1, self.bytes_per_file // max(1, row_bytes))


class ChunkWriter:
    """Writes the rows of a stream to files of equal numbers of rows, in order.

    Args:
        folder: Of the files.
        layout: Of the rows.
    """

    def __init__(self, folder: Path, layout: StreamLayout) -> None:
        self._folder = folder
        self._layout = layout
        self.num_files = 0
        self.pending: dict[str, Array] = {}
        """Rows that do not fill a file yet."""

    def restore(self, num_files: int, pending: Mapping[str, Array]) -> None:
        """Continue after the files that are there.

        Raises:
            ConfigError: If one has been removed.
        """
        there = set(os.listdir(self._folder))
        for name in map(file_name, range(num_files)):
            if name not in there:
                raise missing_rows(self._folder / name)
        self.num_files, self.pending = num_files, dict(pending)

    def add(self, rows: Rows) -> None:
        """Add rows; write the files that are full."""
        if not len(rows.lengths):
            return
        stored = self._layout.stored(rows.arrays)
        if self.pending:
            stored = {
                name: np.concatenate((self.pending[name], array)) for name, array in stored.items()
            }
        count = self._layout.rows_per_file(stored)
        total = len(next(iter(stored.values())))
        start = 0
        while total - start >= count:
            self._write({name: array[start : start + count] for name, array in stored.items()})
            start += count
        self.pending = {name: array[start:].copy() for name, array in stored.items()}

    def finish(self) -> None:
        """Write the last file."""
        if self.pending and len(next(iter(self.pending.values()))):
            self._write(self.pending)
        self.pending = {}

    def _write(self, arrays: Mapping[str, Array]) -> None:
        write_rows(self._folder / file_name(self.num_files), arrays)
        self.num_files += 1
