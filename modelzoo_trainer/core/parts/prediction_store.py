"""The predictions of one process, in memory or, if too large, in files."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from modelzoo_trainer.base.regular_files import read_bytes
from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.tensor_file import bytes_of, can_hold
from modelzoo_trainer.core.parts.predictions import FORMAT, INDEX, VERSION
from modelzoo_trainer.errors import ConfigError, PredictionError, folder_reason

FILE_BYTES: Final = 2**28  # of a file, about
_FINAL: Final = re.compile(r"predictions_\d{5,}(?:_rank_\d+)?\.safetensors")
_PARTIAL: Final = ".predictions_{0:05d}_{1}.partial"
_PARTIALS: Final = ".predictions_*.partial"

Number: TypeAlias = tuple[int, int]
"""The index of a batch, and of the micro-batch in it."""
Rows: TypeAlias = dict[str, Tensor]


class RowsPlace(NamedTuple):
    """The place of rows of one output: the tensor `key` of a file, from `start` to `stop`."""

    file: int
    key: str
    start: int
    stop: int


class BatchPlaces(NamedTuple):
    """The places of the rows of a batch, by output name."""

    number: Number
    places: dict[str, RowsPlace]


class PredictionStore:
    """Collect the outputs of this process's batches.

    Args:
        folder: The folder of files; created with the first one.
        limit: Maximum bytes in memory; 0 = write everything.
        rank: The rank, for file names; None = single process.
    """

    def __init__(self, folder: Path, limit: int, rank: int | None) -> None:
        self.folder = folder
        self.limit = limit
        self.names: tuple[str, ...] | None = None
        """The names of the outputs; None before the first batch."""
        self.written: list[BatchPlaces] = []
        self.held: deque[tuple[Number, Rows]] = deque()
        self.is_written = not limit
        """Whether files are written."""
        self.num_files = 0
        """Of this process."""
        self._file_bytes = min(limit or FILE_BYTES, FILE_BYTES)
        self._num_held = 0
        self._rank = rank

    def add(self, number: Number, rows: Rows) -> None:
        """Add the outputs of a batch.

        Raises:
            ConfigError: If their names have changed.
            PredictionError: If a file cannot be written.
        """
        self.names = self.names or tuple(rows)
        if rows.keys() != set(self.names):
            raise ConfigError(
                f"The model's outputs differ between batches: batch {number[0]} has "
                f"{', '.join(rows)}, earlier batches have {', '.join(self.names)}. Return the same "
                f"outputs for each batch, or select common ones in compute_predictions."
            )
        self._num_held += _size(rows)
        self.held.append((number, rows))
        self.is_written |= self._num_held > self.limit
        while self.is_written and self._num_held >= self._file_bytes:
            self._write_file()

    def write_rest(self) -> None:
        """Write all outputs that are still in memory.

        Raises:
            PredictionError: If a file cannot be written.
        """
        while self.held:
            self._write_file()

    def _write_file(self) -> None:
        """Write the first batches in memory to a file."""
        batches: list[tuple[Number, Rows]] = []
        size = 0
        while self.held and (not batches or size < self._file_bytes):
            batches.append(self.held.popleft())
            size += _size(batches[-1][1])
        self._num_held -= size
        places: list[dict[str, RowsPlace]] = [{} for _ in batches]
        tensors: Rows = {}
        for name in self.names or ():
            column = [rows[name] for _, rows in batches]
            for idx, key, start in _joined(name, column, tensors, self.names or ()):
                stop = start + len(column[idx])
                places[idx][name] = RowsPlace(self.num_files, key, start, stop)
        path = self._partial(self.num_files)
        self.num_files += 1
        self._save(path, tensors)
        self.written += [
            BatchPlaces(number, place) for (number, _), place in zip(batches, places, strict=True)
        ]

    def _save(self, path: Path, tensors: Rows) -> None:
        for name, tensor in tensors.items():
            if not can_hold(tensor):
                raise PredictionError(
                    f"The output {name!r} has dtype {tensor.dtype}, which cannot be saved in a "
                    f"safetensors file. Convert it in compute_predictions."
                )
        try:
            disk.make_folder(self.folder)
            fd = disk.open_new(path)
            try:
                for chunk in bytes_of(tensors):
                    disk.write(fd, chunk)
                disk.sync(fd)
            finally:
                disk.close(fd)
        except OSError as error:
            raise refusal(path, error) from error

    def _partial(self, number: int) -> Path:
        return self.folder / _PARTIAL.format(number, self._rank or 0)

    def name_of(self, number: int) -> str:
        """Return the final name of a file of this process."""
        rank = "" if self._rank is None else f"_rank_{self._rank}"
        return f"predictions_{number:05d}{rank}.safetensors"

    def commit_files(self) -> None:
        """Rename the files to their final names.

        Raises:
            PredictionError: If a file cannot be renamed.
        """
        for number in range(self.num_files):
            path = self.folder / self.name_of(number)
            try:
                disk.rename(self._partial(number), path)
            except OSError as error:
                raise refusal(path, error) from error

    def discard(self) -> None:
        """Clear the memory, and remove partial files."""
        self.held.clear()
        for number in range(self.num_files):
            with suppress(OSError):
                disk.unlink(self._partial(number))


def _size(rows: Rows) -> int:
    return sum(tensor.nbytes for tensor in rows.values())


def _joined(
    name: str, column: list[Tensor], tensors: Rows, names: Collection[str]
) -> Iterator[tuple[int, str, int]]:
    """Add an output of some batches to `tensors`, concatenated where possible.

    Yields:
        The index of a batch, the key of the tensor with its rows, and the first row.
    """
    runs = [list(run) for _, run in groupby(enumerate(column), lambda item: _kind(item[1]))]
    for number, run in enumerate(runs):
        key = name if len(runs) == 1 else f"{name}/{number}"
        while key in tensors or (key != name and key in names):
            key += "_"
        tensors[key] = torch.cat([tensor for _, tensor in run])
        start = 0
        for idx, tensor in run:
            yield idx, key, start
            start += len(tensor)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape[1:], tensor.dtype


def refusal(path: Path, error: OSError) -> PredictionError:
    """Return the error for a failed write."""
    return PredictionError(
        f"Cannot write predictions to {str(path)!r}: {folder_reason(path.parent, error)}. "
        f"Free disk space, or use another output_dir."
    )


# ---- what the main process does


def prepare_folder(folder: Path, *, makes: bool) -> str | None:
    """Prepare a folder, and remove partial files; return why it cannot be used, or None.

    Args:
        folder: The folder.
        makes: Whether to create it.
    """
    where = f"output_dir {str(folder)!r}"
    try:
        if makes:
            disk.make_folder(folder)
        if not folder.is_dir():
            return f"{where} is not a folder. Choose another one." if folder.exists() else None
        for path in folder.glob(_PARTIALS):
            disk.unlink(path)
        strange = sorted(_own_names(folder) - set(_names_of_index(folder)))
    except OSError as error:
        return f"{where} cannot be used: {folder_reason(folder, error)}. Choose another one."
    if strange:
        return (
            f"{where} contains {strange[0]}, but no {INDEX} that lists it. Move it away, or choose "
            f"another folder."
        )
    return None


def _own_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if _FINAL.fullmatch(path.name)}


def _names_of_index(folder: Path) -> list[str]:
    """Return the files listed by the index of a folder; empty if it is unreadable."""
    try:
        raw = json.loads(read_bytes(folder / INDEX))
        return [str(name) for name in raw["files"]] if raw["format"] == FORMAT else []
    except (OSError, ValueError, LookupError, TypeError):
        return []


def remove_earlier(folder: Path) -> None:
    """Remove the predictions in a folder, the index first.

    Raises:
        PredictionError: If a file cannot be removed.
    """
    try:
        names = _own_names(folder) & set(_names_of_index(folder))
        disk.unlink(folder / INDEX)
        for name in names:
            disk.unlink(folder / name)
    except OSError as error:
        raise refusal(folder, error) from error


def write_index(
    folder: Path, files: list[str], outputs: Mapping[str, list[RowsPlace]], *, is_complete: bool
) -> None:
    """Write the index of all processes' files, which commits the predictions."""
    index = {
        "format": FORMAT,
        "version": VERSION,
        "is_complete": is_complete,
        "files": files,
        "outputs": {name: _merged(places) for name, places in outputs.items()},
    }
    partial = folder / _PARTIAL.format(0, "index")
    try:
        disk.unlink(partial)
        fd = disk.open_new(partial)
        try:
            disk.write(fd, json.dumps(index).encode("ascii"))
            disk.sync(fd)
        finally:
            disk.close(fd)
        disk.rename(partial, folder / INDEX)
        disk.sync_folder(folder)
    except OSError as error:
        raise refusal(folder / INDEX, error) from error


def _merged(places: list[RowsPlace]) -> list[RowsPlace]:
    """Merge consecutive places in a tensor."""
    found: list[RowsPlace] = []
    for place in places:
        last = found[-1] if found else None
        if last is not None and last[:2] == place[:2] and last.stop == place.start:
            found[-1] = last._replace(stop=place.stop)
        else:
            found.append(place)
    return found
