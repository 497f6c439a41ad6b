"""The model of a checkpoint, read one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.checkpointing.checked_file import checked_json, record_of_name
from modelzoo_trainer.checkpointing.lazy_weights import LazyWeights, open_weights
from modelzoo_trainer.checkpointing.load_save import problems_of_file
from modelzoo_trainer.checkpointing.manifest import (
    STATE,
    SUFFIX,
    Manifest,
    check_listing,
    read_manifest,
)
from modelzoo_trainer.checkpointing.shard_index import SHARDS, ShardedTensor
from modelzoo_trainer.checkpointing.sharded import as_saved, dtype_of, narrowed, read_index
from modelzoo_trainer.checkpointing.stores.reading import opened
from modelzoo_trainer.errors import CheckpointError

_MODEL: Final = ("model",)  # keys of the state
_AVERAGE: Final = ("callbacks", "ModelEma", "average")


def open_model(path: Path) -> LazyWeights:
    """Open the model of a checkpoint of any layout.

    Args:
        path: The folder of the checkpoint.

    Raises:
        CheckpointError: If it is damaged, or its state has no model.

    Cost: A file is verified when a tensor of it is first asked for, so each is read twice; a
        tensor in memory at a time, of a sharded one also one of its blocks.
    """
    made = _open(path, _MODEL)
    if not made.names():
        raise CheckpointError(
            f"The state in checkpoint {str(path)!r} has no tensors under 'model', where a Trainer "
            f"saves the model's tensors."
        )
    return made


def open_average(path: Path) -> LazyWeights:
    """Open the averaged weights of a checkpoint, by the names of the model; as `open_model`.

    Raises:
        CheckpointError: If it is damaged, or has no averaged weights.
    """
    made = _open(path, _AVERAGE)
    if not made.names():
        raise CheckpointError(
            f"Checkpoint {str(path)!r} has no averaged weights: the run had no callback ModelEma. "
            f"Omit --averaged."
        )
    return made


def _open(path: Path, keys: tuple[str, ...]) -> LazyWeights:
    manifest = read_manifest(path)
    check_listing(path, manifest)
    files = _VerifiedFiles(path, manifest)
    if SHARDS in manifest.files:
        return _Sharded(path, manifest, files, keys)
    return _Whole(path, files, keys)


class _VerifiedFiles:
    """The tensor files of a checkpoint, each verified when it is first used."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self.manifest = manifest
        self._opened: dict[str, LazyWeights] = {}

    def file(self, name: str) -> LazyWeights:
        """Return a file of tensors; opened before it is verified, so that no later change counts.

        Raises:
            CheckpointError: If it is damaged.
        """
        if name not in self._opened:
            record = record_of_name(self.manifest.files, name)
            path = self._path / name
            weights = opened(self._path, {name: record}, partial(open_weights, path))
            problems = problems_of_file(path, record)
            if problems:
                raise CheckpointError(f"{problems[0]}. Use another checkpoint.")
            self._opened[name] = weights
        return self._opened[name]

    def with_tensor(self, file: str, name: str) -> LazyWeights:
        """Return a file that has a tensor.

        Raises:
            CheckpointError: If it is damaged, or has none of this name.
        """
        found = self.file(file)
        if name not in found.names():
            raise CheckpointError(
                f"{str(self._path / file)!r} lacks the tensor {name!r}. The checkpoint is damaged; "
                f"use another checkpoint."
            )
        return found


class _Whole(LazyWeights):
    """A checkpoint written by one process."""

    def __init__(self, path: Path, files: _VerifiedFiles, keys: tuple[str, ...]) -> None:
        self._files = files
        part = checked_json(path / STATE, record_of_name(files.manifest.files, STATE))
        for key in keys:
            part = part.get(key) if isinstance(part, dict) else None
        self._places = dict(_references(part, ()))

    @override
    def names(self) -> list[str]:
        return list(self._places)

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        file, stored = self._places[name]
        return self._files.with_tensor(file, stored).shape(stored)

    @override
    def dtype(self, name: str) -> torch.dtype:
        file, stored = self._places[name]
        return self._files.with_tensor(file, stored).dtype(stored)

    @override
    def read(self, name: str) -> Tensor:
        file, stored = self._places[name]
        return self._files.with_tensor(file, stored).read(stored)

    @override
    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        file, stored = self._places[name]
        return self._files.with_tensor(file, stored).read_rows(stored, start, stop)


def _references(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the full name of each real tensor in a part of the state, with its file and name."""
    if not isinstance(value, Mapping):
        return
    if value.get("__type__") == "tensor":
        yield ".".join(path), (f"{value['file']}{SUFFIX}", str(value["name"]))
    elif "__type__" not in value:
        for key, item in value.items():
            yield from _references(item, (*path, key))


class _Sharded(LazyWeights):
    """A checkpoint written by several processes: tensors are made of blocks."""

    def __init__(
        self, path: Path, manifest: Manifest, files: _VerifiedFiles, keys: tuple[str, ...]
    ) -> None:
        self._files = files
        index = read_index(path, manifest)
        self._tensors: dict[str, ShardedTensor] = {}
        for name, steps in index.paths.items():
            way = [str(key) for _, key in steps]
            if name in index.tensors and tuple(way[: len(keys)]) == keys:
                self._tensors[".".join(way[len(keys) :])] = index.tensors[name]

    @override
    def names(self) -> list[str]:
        return list(self._tensors)

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    @override
    def dtype(self, name: str) -> torch.dtype:
        return dtype_of(self._tensors[name])

    @override
    def read(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        whole: Tensor | None = None
        for chunk in tensor.chunks:
            stored = self._files.with_tensor(chunk.file, chunk.name).read(chunk.name)
            block = as_saved(stored, tensor, chunk)
            if chunk.lengths == tensor.shape:
                return block
            if whole is None:
                whole = block.new_empty(tensor.shape)
            narrowed(whole, chunk.offsets, chunk.lengths).copy_(block)
        return torch.empty(tensor.shape, dtype=dtype_of(tensor)) if whole is None else whole

    @override
    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        self._check_rows(name, start, stop)
        return self.read(name)[start:stop].clone()
