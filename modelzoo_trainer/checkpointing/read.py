"""Loading a checkpoint in one pass: the bytes that are used are those that are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from modelzoo_trainer.checkpointing.checked_file import checked_json, open_checked, record_of_name
from modelzoo_trainer.checkpointing.files import check_listing
from modelzoo_trainer.checkpointing.manifest import STATE, FileRecord, Manifest, read_manifest
from modelzoo_trainer.checkpointing.shard_index import SHARDS
from modelzoo_trainer.checkpointing.state_json import Tensors, decode
from modelzoo_trainer.checkpointing.tensor_file import as_bytes
from modelzoo_trainer.checkpointing.tensor_header import read_header
from modelzoo_trainer.errors import CheckpointError

SUFFIX: Final = ".safetensors"


def load(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint, if all of it is what was written.

    Tensors are in host memory of their own: nothing of the files is mapped.

    Args:
        path: Its directory.

    Raises:
        CheckpointError: If it is not intact, of another version, or not a checkpoint.

    Cost: Reads each file once; memory for the state and nothing else that grows with it.
    """
    manifest = read_manifest(path)
    if SHARDS in manifest.files:
        from modelzoo_trainer.checkpointing.sharded import load_sharded

        return load_sharded(path, manifest)
    check_listing(path, manifest)
    return _load(path, manifest)


def _load(path: Path, manifest: Manifest) -> dict[str, Any]:
    skeleton = checked_json(path / STATE, record_of_name(manifest.files, STATE))
    if not isinstance(skeleton, dict):
        raise CheckpointError(f"{str(path / STATE)!r} holds no state.")
    tensors: Tensors = {
        name.removesuffix(SUFFIX): _tensors_of(path / name, record)
        for name, record in sorted(manifest.files.items())
        if name.endswith(SUFFIX)
    }
    return decode(skeleton, tensors)


def _tensors_of(path: Path, record: FileRecord) -> dict[str, Tensor]:
    """Return the tensors of a file, each in memory of its own."""
    with open_checked(path, record) as file:
        header = read_header(file, file.size)
        tensors = {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            for name, entry in header.tensors.items()
        }
        file.fill(map(as_bytes, tensors.values()))
        file.finish()
    return tensors
