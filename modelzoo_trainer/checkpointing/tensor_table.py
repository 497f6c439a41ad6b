"""Which tensors a checkpoint has, as its files say it, without reading them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from modelzoo_trainer.checkpointing.checked_file import checked_json, open_checked, record_of_name
from modelzoo_trainer.checkpointing.manifest import Manifest
from modelzoo_trainer.checkpointing.shard_index import SHARDS, ShardIndex, parse_index
from modelzoo_trainer.checkpointing.tensor_header import DTYPES, read_header
from modelzoo_trainer.errors import CheckpointError

_SUFFIX = ".safetensors"
_NUM_BYTES = dict(DTYPES.values()) | {"complex128": 16}


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor.

    Args:
        name: Its file's name without the suffix, and its name there; of a checkpoint that several
            processes wrote, its full name.
        dtype: As torch calls it.
        shape: Its lengths; of complex numbers in a file, one more of 2.
        num_bytes: What it takes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def tensor_table(path: Path, manifest: Manifest) -> list[TensorRow]:
    """Return the tensors of a checkpoint.

    Args:
        path: Its directory.
        manifest: What was read of it.

    Raises:
        CheckpointError: If a header cannot be read.

    Cost: Reads headers only: what they say is not verified.
    """
    if SHARDS in manifest.files:
        index = parse_index(checked_json(path / SHARDS, record_of_name(manifest.files, SHARDS)))
        return _sharded_rows(index)
    rows = []
    for file in sorted(name for name in manifest.files if name.endswith(_SUFFIX)):
        with open_checked(path / file, None) as opened:
            header = read_header(opened, opened.size)
        for name, entry in header.tensors.items():
            full = f"{file.removesuffix(_SUFFIX)}.{name}"
            rows.append(TensorRow(full, entry.dtype, entry.shape, entry.num_bytes))
    return sorted(rows, key=lambda row: row.name)


def _sharded_rows(index: ShardIndex) -> list[TensorRow]:
    rows = []
    for name, tensor in sorted(index.tensors.items()):
        if tensor.dtype not in _NUM_BYTES:
            raise CheckpointError(f"{SHARDS!r} names the unknown dtype {tensor.dtype!r}.")
        num_bytes = prod(tensor.shape) * _NUM_BYTES[tensor.dtype]
        rows.append(TensorRow(name, tensor.dtype, tensor.shape, num_bytes))
    return rows
