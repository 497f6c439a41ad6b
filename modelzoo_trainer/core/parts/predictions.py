"""The result of `trainer.predict`: outputs by name, in memory or in files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.base.regular_files import open_regular, read_text
from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.tensor_file import as_bytes
from modelzoo_trainer.checkpointing.tensor_header import Header, TensorEntry, read_header
from modelzoo_trainer.errors import PredictionError, reason_of

INDEX: Final = "predictions.json"
FORMAT: Final = "modelzoo_trainer.predictions"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class OutputPart:
    """Consecutive rows of one output: their shape and type, and how to load them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> OutputPart:
        """Return the part of a tensor in memory."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)


class Predictions(Mapping[str, Tensor | list[Tensor]]):
    """The outputs of a model for a dataset, by name and in the order of the data.

    `predictions["logits"]` is a tensor in host memory with a row per sample. If shapes or types
    differ between batches, such as logits of texts of different lengths, it is a list with a
    tensor per sample. `predictions["logits"][7]` belongs to sample 7 either way.

    Outputs that are too large for memory are in files, which each access reads; `parts` reads one
    piece at a time. `Predictions.load` opens such a folder later.

    `is_complete`: all batches were predicted, without a stop. `path`: the folder of the files;
    None = in memory.
    """

    def __init__(
        self,
        parts: Mapping[str, Sequence[OutputPart]],
        *,
        is_complete: bool = True,
        path: Path | None = None,
    ) -> None:
        self._parts = dict(parts)
        self.is_complete = is_complete
        self.path = path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Open the predictions in a folder, without reading them.

        Args:
            path: The folder: `output_dir` of `predict`.

        Raises:
            PredictionError: If there are none, or they are damaged.
        """
        folder = Path(path).absolute()
        index = _Index(folder)
        return cls(index.parts(), is_complete=index.is_complete, path=folder)

    @property
    def num_samples(self) -> int:
        """The number of rows of the first output."""
        first: Sequence[OutputPart] = next(iter(self._parts.values()), ())
        return sum(part.shape[0] for part in first)

    def parts(self, name: str) -> Iterator[Tensor]:
        """Yield an output in pieces of at most one file, in order."""
        for part in self._of(name):
            yield part.load()

    @override
    def __getitem__(self, name: str) -> Tensor | list[Tensor]:
        parts = self._of(name)
        if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
            return [row for part in parts for row in part.load()]
        if len(parts) == 1:
            return parts[0].load()
        num, rest = sum(part.shape[0] for part in parts), parts[0].shape[1:]
        whole = torch.empty((num, *rest), dtype=parts[0].dtype)
        begin = 0
        for part in parts:
            whole[begin : begin + part.shape[0]] = part.load()
            begin += part.shape[0]
        return whole

    def _of(self, name: str) -> Sequence[OutputPart]:
        if name not in self._parts:
            raise KeyError(f"no output {name!r}; available: {', '.join(self._parts) or 'none'}")
        return self._parts[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    @override
    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        shown = [f"{name}: {_described(parts)}" for name, parts in self._parts.items()]
        notes = [] if self.path is None else [f"in {self.path}"]
        notes += [] if self.is_complete else ["incomplete"]
        tail = f"; {', '.join(notes)}" if notes else ""
        return f"{type(self).__name__}({', '.join(shown)}{tail})"


def _described(parts: Sequence[OutputPart]) -> str:
    num = sum(part.shape[0] for part in parts)
    kinds = {(part.shape[1:], part.dtype) for part in parts}
    if len(kinds) > 1:
        return f"{num} tensors"
    [(rest, dtype)] = kinds
    return f"{str(dtype).removeprefix('torch.')} {(num, *rest)}"


# ---- files


class _Index:
    """The index of a folder of predictions, checked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / INDEX
        try:
            text = read_text(self._path)
            self._identity = identity_of(self._path)
        except OSError as error:
            raise PredictionError(
                f"{str(folder)!r} has no predictions: {INDEX} cannot be read "
                f"({error.strerror or error}). Pass the output_dir of a finished predict(). With "
                f"several hosts it must be on a shared file system."
            ) from None
        try:
            raw = json.loads(text)
            is_known = raw["format"] == FORMAT and raw["version"] == VERSION
            self.is_complete = bool(raw["is_complete"])
            self._files = [_plain_name(name) for name in raw["files"]]
            self._outputs = dict(raw["outputs"].items())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise PredictionError(
                f"{str(self._path)!r} is not a valid index of predictions: {reason_of(error)}."
            ) from error
        if not is_known:
            raise PredictionError(
                f"{str(self._path)!r} has the format {raw['format']!r}, version "
                f"{raw['version']!r}; expected {FORMAT!r}, version {VERSION}."
            )

    def parts(self) -> dict[str, list[OutputPart]]:
        """Return the parts of all outputs."""
        headers = [self._header(name) for name in self._files]
        try:
            return {
                name: [self._part(headers, *place) for place in places]
                for name, places in self._outputs.items()
            }
        except (ValueError, LookupError, TypeError) as error:
            raise PredictionError(
                f"{str(self._path)!r} does not match its files: {reason_of(error)}."
            ) from error

    def _header(self, name: str) -> Header:
        path = self._folder / name
        try:
            with open_regular(path) as file:
                return read_header(file, path.stat().st_size)
        except (OSError, ValueError) as error:
            raise PredictionError(f"{str(path)!r} cannot be read: {error}.") from error

    def _part(
        self, headers: Sequence[Header], file: int, key: str, start: int, stop: int
    ) -> OutputPart:
        entry = headers[file].tensors[key]
        if file < 0 or not entry.shape or not 0 <= start <= stop <= entry.shape[0]:
            raise ValueError(f"{key!r} has no rows {start} to {stop}")
        path, data_start = self._folder / self._files[file], headers[file].data_start
        load = partial(self._load, path, data_start, entry, (start, stop))
        return OutputPart((stop - start, *entry.shape[1:]), getattr(torch, entry.dtype), load)

    def _load(
        self, path: Path, data_start: int, entry: TensorEntry, rows: tuple[int, int]
    ) -> Tensor:
        """Read rows of a tensor, unless the files have been replaced."""
        start, stop = rows
        tensor = torch.empty((stop - start, *entry.shape[1:]), dtype=getattr(torch, entry.dtype))
        per_row = entry.num_bytes // entry.shape[0] if entry.shape[0] else 0
        try:
            fd = disk.open_old(path)
            try:
                position = data_start + entry.begin + start * per_row
                num = disk.read_at(fd, [as_bytes(tensor)] if tensor.nbytes else [], position)
            finally:
                disk.close(fd)
            is_same = identity_of(self._path) == self._identity
        except OSError as error:
            raise PredictionError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
        if not is_same or num != tensor.nbytes:
            raise PredictionError(
                f"The predictions in {str(self._folder)!r} have been replaced since they were "
                f"opened. Use a separate output_dir for each predict()."
            )
        return tensor


def identity_of(path: Path) -> tuple[int, int, int]:
    """Return an identity that changes when a file is replaced."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns, found.st_size


def _plain_name(name: Any) -> str:
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise ValueError(f"{name!r} is not a file name")
    return name
