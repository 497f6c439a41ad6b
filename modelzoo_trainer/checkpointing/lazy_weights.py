"""Files of weights, read one tensor at a time: safetensors, files of torch.save, and shards."""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.checked_file import CHUNK, open_checked
from modelzoo_trainer.checkpointing.manifest import MANIFEST, STATE, SUFFIX
from modelzoo_trainer.checkpointing.shard_index import SHARDS
from modelzoo_trainer.checkpointing.tensor_file import as_bytes
from modelzoo_trainer.checkpointing.tensor_header import Header, TensorEntry, read_header
from modelzoo_trainer.checkpointing.torch_file import (
    CONVERT,
    SUFFIXES,
    copied_tensors,
    open_torch_file,
)
from modelzoo_trainer.errors import CheckpointError

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLES: Final = (".pkl", ".pickle")
_OF_TORCH: Final = "pytorch_model.bin"  # Hugging Face's name for what torch.save has written
_INDEX_OF_TORCH: Final = "pytorch_model.bin.index.json"
_SHARD: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|bin)")
_MAX_INDEX_BYTES: Final = 1 << 28
_OF_CHECKPOINTS: Final = (MANIFEST, STATE, SHARDS)


class LazyWeights(ABC):
    """Tensors by name, read on request.

    Every call of `read` and `read_rows` reads the file and returns host memory that belongs to the
    caller. Tied weights have all their names.
    """

    @abstractmethod
    def names(self) -> list[str]:
        """Return all names, in the order of the file."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; raise KeyError for an unknown name."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor; raise KeyError for an unknown name."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            CheckpointError: If the file cannot be read, or has changed since it was opened.
            KeyError: If the name is unknown.
        """

    @abstractmethod
    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read `tensor[start:stop]`, and of the file no more than that.

        Raises:
            ValueError: If the tensor has no such rows.
            CheckpointError, KeyError: As `read`.
        """

    def read_all(self) -> dict[str, Tensor]:
        """Read all tensors; tied weights share memory, as far as the file says so."""
        return {name: self.read(name) for name in self.names()}

    def _check_rows(self, name: str, start: int, stop: int) -> None:
        shape = self.shape(name)
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise ValueError(f"tensor {name!r} of shape {shape} has no rows {start} to {stop}")


def open_weights(path: Path) -> LazyWeights:
    """Open a file of weights, or a folder in the layout of Hugging Face.

    Headers, sizes and the index are checked now; the values of a safetensors file are read later.
    Nothing is unpickled but tensors (`weights_only=True`).

    Args:
        path: The file; or a folder with model.safetensors, or with model.safetensors.index.json
            and the files that it lists; otherwise with pytorch_model.bin or its index.

    Raises:
        CheckpointError: If it is missing, damaged, not a file of weights, one that torch cannot
            read safely, or an index that refers to files elsewhere or does not match its files.

    Cost: Reads the headers of safetensors files. Reads `.pt`, `.pth`, `.bin` and `.ckpt` files once
        to check their sums, and maps them while the result exists; those from before torch 1.6 are
        in host memory as long.
    """
    if path.is_dir():
        return _open_folder(path)
    if path.suffix.lower() in PICKLES:
        raise CheckpointError(
            f"{str(path)!r} is a pickle, which may run code when loaded. {CONVERT}"
        )
    if not path.is_file():
        problem = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{str(path)!r} {problem}.")
    if path.name.endswith(".index.json"):
        return _Shards(path)
    return _open_one(path)


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, committed or not."""
    is_unfinished = folder.name.startswith((".tmp-", ".trash-"))
    return is_unfinished or any((folder / name).exists() for name in _OF_CHECKPOINTS)


def _open_one(path: Path) -> LazyWeights:
    is_of_torch = path.suffix.lower() in SUFFIXES
    return _TorchFile(_file_of(path)) if is_of_torch else _SafetensorsFile(_file_of(path))


def _open_folder(folder: Path) -> LazyWeights:
    if is_checkpoint(folder):
        raise CheckpointError(
            f"{str(folder)!r} is a checkpoint, not a folder of weights. Load it as a checkpoint, "
            f"or export its weights: modelzoo-trainer checkpoint export {folder} "
            f"model.safetensors"
        )
    if (folder / SINGLE).is_file():
        return _open_one(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _Shards(folder / INDEX)
    if (folder / _OF_TORCH).is_file():
        return _open_one(folder / _OF_TORCH)
    if (folder / _INDEX_OF_TORCH).is_file():
        return _Shards(folder / _INDEX_OF_TORCH)
    raise CheckpointError(_what_is_there(folder))


def _what_is_there(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    files = [name for name in names if name.lower().endswith((SUFFIX, *SUFFIXES))]
    hint = f" Pass the path of one of its files: {', '.join(files[:5])}." if files else ""
    pickles = [name for name in names if name.lower().endswith(PICKLES)]
    if pickles and not files:
        return (
            f"{str(folder)!r} has only {pickles[0]!r}, a pickle, which may run code when loaded. "
            f"{CONVERT}"
        )
    return f"{str(folder)!r} has neither {SINGLE} nor {INDEX}.{hint}"


def _file_of(path: Path) -> Path:
    """Resolve links: Hugging Face's cache has links to its files."""
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}.") from None


class _SafetensorsFile(LazyWeights):
    """A safetensors file, open only while it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with open_checked(path, None) as file:
            self._header: Header = read_header(file, file.size)
            self._identity = _identity(file.fd)
        found = self._header.tensors
        aliases = self._header.metadata.items()
        self._stored = {name: name for name in found}
        for alias, name in aliases:
            if name in found:
                self._stored.setdefault(alias, name)

    @override
    def names(self) -> list[str]:
        return list(self._stored)

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    @override
    def dtype(self, name: str) -> torch.dtype:
        return _dtype(self._entry(name))

    @override
    def read(self, name: str) -> Tensor:
        entry = self._entry(name)
        return self._read(entry, entry.shape, 0)

    @override
    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        self._check_rows(name, start, stop)
        entry = self._entry(name)
        per_row = prod(entry.shape[1:]) * _dtype(entry).itemsize
        return self._read(entry, (stop - start, *entry.shape[1:]), start * per_row)

    @override
    def read_all(self) -> dict[str, Tensor]:
        found = {name: self.read(name) for name in self._header.tensors}
        return {name: found[stored] for name, stored in self._stored.items()}

    def _entry(self, name: str) -> TensorEntry:
        return self._header.tensors[self._stored[name]]

    def _read(self, entry: TensorEntry, shape: tuple[int, ...], skipped: int) -> Tensor:
        """Read a part of a tensor, contiguous in the file from a number of bytes on."""
        tensor = torch.empty(shape, dtype=_dtype(entry))
        view = as_bytes(tensor)
        position = self._header.data_start + entry.begin + skipped
        with open_checked(self._path, None) as file:
            if _identity(file.fd) != self._identity:
                raise ValueError("it has changed since it was opened")
            for begin in range(0, len(view), CHUNK):
                part = view[begin : begin + CHUNK]
                if disk.read_at(file.fd, [part], position + begin) != len(part):
                    raise ValueError("the file is shorter than expected")
        return tensor


def _identity(fd: int) -> tuple[int, ...]:
    """Return what differs after a file was replaced or written to."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _dtype(entry: TensorEntry) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype


class _TorchFile(LazyWeights):
    """A file of `torch.save`, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self._tensors = open_torch_file(path)

    @override
    def names(self) -> list[str]:
        return list(self._tensors)

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    @override
    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    @override
    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach().clone()

    @override
    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        self._check_rows(name, start, stop)
        return self._tensors[name].detach()[start:stop].clone()

    @override
    def read_all(self) -> dict[str, Tensor]:
        return copied_tensors(self._tensors)


class _Shards(LazyWeights):
    """The files that an index lists."""

    def __init__(self, index: Path) -> None:
        places = _places(index)
        shards = sorted(set(places.values()))
        self._order = [_open_one(index.parent / shard) for shard in shards]
        self._files: dict[str, LazyWeights] = {}
        for shard, file in zip(shards, self._order, strict=True):
            for name in file.names():
                if places.get(name, shard) == shard:
                    self._files.setdefault(name, file)
        missing = [name for name, shard in places.items() if name not in self._files]
        if missing:
            raise CheckpointError(
                f"{str(index)!r} lists the tensor {missing[0]!r} in {places[missing[0]]!r}, but "
                f"that file does not have it (missing in total: {len(missing)}). Download the "
                f"files again."
            )

    @override
    def names(self) -> list[str]:
        return list(self._files)

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].shape(name)

    @override
    def dtype(self, name: str) -> torch.dtype:
        return self._files[name].dtype(name)

    @override
    def read(self, name: str) -> Tensor:
        return self._files[name].read(name)

    @override
    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._files[name].read_rows(name, start, stop)

    @override
    def read_all(self) -> dict[str, Tensor]:
        return {
            name: tensor
            for file in self._order
            for name, tensor in file.read_all().items()
            if self._files.get(name) is file
        }


def _places(index: Path) -> Mapping[str, str]:
    """Return the file of each tensor."""
    with open_checked(_file_of(index), None) as file:
        if file.size > _MAX_INDEX_BYTES:
            raise ValueError(f"it has {file.size} bytes, an index at most {_MAX_INDEX_BYTES}")
        places = json.loads(file.read(file.size))["weight_map"]
        outside = [shard for shard in _values(places) if not _SHARD.fullmatch(shard)]
        if outside:
            raise CheckpointError(
                f"{str(index)!r} lists the file {outside[0]!r}; expected names of .safetensors or "
                f".bin files in the same folder."
            )
        return dict(places)


def _values(places: Any) -> Iterator[str]:
    if not isinstance(places, dict) or not places:
        raise ValueError("weight_map must be a JSON object that maps tensor names to files")
    for shard in places.values():
        if not isinstance(shard, str):
            raise ValueError(f"weight_map must map tensor names to file names, got {shard!r}")
        yield shard
