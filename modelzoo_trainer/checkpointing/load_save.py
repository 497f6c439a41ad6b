"""Save, load and verify a checkpoint of one process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any, SupportsIndex, TypeAlias

import torch
from torch import Tensor

from modelzoo_trainer.checkpointing.checked_file import (
    CHUNK,
    NUM_AHEAD,
    checked_json,
    open_checked,
    record_of_name,
)
from modelzoo_trainer.checkpointing.manifest import (
    STATE,
    SUFFIX,
    FileRecord,
    Manifest,
    check_listing,
    listing_problems,
    read_manifest,
)
from modelzoo_trainer.checkpointing.shard_index import SHARDS
from modelzoo_trainer.checkpointing.state_json import Encoder, Tensors, decode
from modelzoo_trainer.checkpointing.tensor_file import as_bytes, bytes_of
from modelzoo_trainer.checkpointing.tensor_header import read_header
from modelzoo_trainer.checkpointing.transaction import (
    CheckpointTransaction,
    check_step,
    plain_facts,
)
from modelzoo_trainer.errors import CheckpointError

Files: TypeAlias = Mapping[str, Iterable[bytes | memoryview]]
"""What is to be written: by name, piece by piece."""


def save(
    path: Path,
    state: Mapping[str, Any],
    *,
    step: SupportsIndex,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint so that it is there whole, also after a power loss, or not at all.

    Every file, the directory and its parent are synchronised around one rename.

    Args:
        path: A name that is not in use.
        state: What to save; see `Encoder`.
        step: The global step, >= 0, for the manifest.
        facts: What else the manifest is to say: text, numbers, lists and mappings of them.

    Raises:
        CheckpointError: If the name is in use, the state has something that cannot be saved, or
            the disk refuses. Nothing is left behind then.

    Cost: One block of one tensor at a time is in memory besides the state.
    """
    plain_step, plain = check_step(step), plain_facts(facts or {})
    encoded = Encoder(state)
    files: dict[str, Iterable[bytes | memoryview]] = {
        f"{stem}{SUFFIX}": bytes_of(tensors) for stem, tensors in encoded.tensors.items()
    }
    write_files(
        CheckpointTransaction(path), files | {STATE: [state_json_text(encoded)]}, plain_step, plain
    )


def state_json_text(encoded: Encoder) -> bytes:
    """Return a state without its tensors as it is written."""
    return json.dumps(encoded.state_json, allow_nan=False).encode("ascii")


def write_files(
    transaction: CheckpointTransaction, files: Files, step: int, facts: Mapping[str, Any]
) -> None:
    """Write all files of a checkpoint and commit it.

    Raises:
        CheckpointError: If the disk refuses. Nothing is left behind then.
    """
    with transaction:
        for name, chunks in files.items():
            transaction.write(name, chunks)
        transaction.commit(step=step, facts=facts)


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
    state_json = checked_json(path / STATE, record_of_name(manifest.files, STATE))
    if not isinstance(state_json, dict):
        raise CheckpointError(f"{str(path / STATE)!r} holds no state.")
    tensors: Tensors = {
        name.removesuffix(SUFFIX): _tensors_of(path / name, record)
        for name, record in sorted(manifest.files.items())
        if name.endswith(SUFFIX)
    }
    return decode(state_json, tensors)


def _tensors_of(path: Path, record: FileRecord) -> dict[str, Tensor]:
    """Return the tensors of a file, each in memory of its own."""
    with open_checked(path, record) as file:
        header = read_header(file, file.size)
        tensors = {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            for name, entry in header.tensors.items()
        }
        file.parallel_read(map(as_bytes, tensors.values()))
        file.finish()
    return tensors


def verify(path: Path) -> list[str]:
    """Return what is wrong with a checkpoint; an empty list if it is intact.

    Args:
        path: Its directory.

    Cost: Reads all files once, in memory that does not grow with them.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [_text(error)]
    problems = listing_problems(path, manifest)
    for name, record in sorted(manifest.files.items()):
        if not problems or _has_its_size(path / name, record):
            problems += _problems(path / name, record)
    return problems


def _has_its_size(file: Path, record: FileRecord) -> bool:
    return file.is_file() and file.lstat().st_size == record.size_bytes


def _problems(path: Path, record: FileRecord) -> list[str]:
    try:
        with open_checked(path, record) as file:
            file.parallel_read(_views(file.size))
            file.finish()
    except CheckpointError as error:
        return [_text(error)]
    return []


def _views(num_bytes: int) -> Iterator[memoryview]:
    """Yield room for a file, the same again when what was read into it has been looked at."""
    ring = [memoryview(bytearray(min(CHUNK, num_bytes))) for _ in range(NUM_AHEAD + 2)]
    for begin, view in zip(range(0, num_bytes, CHUNK), cycle(ring)):
        yield view[: num_bytes - begin]


def _text(error: CheckpointError) -> str:
    return str(error).removesuffix(".")
