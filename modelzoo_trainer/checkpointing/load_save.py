"""Save, load and verify a checkpoint of one process."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from modelzoo_trainer.checkpointing.checked_file import (
    CHUNK,
    NUM_AHEAD,
    checked_json,
    open_checked,
    record_of_name,
)
from modelzoo_trainer.checkpointing.file_writing import write_file
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
from modelzoo_trainer.checkpointing.state_json import StateEncoder, Tensors, decode
from modelzoo_trainer.checkpointing.stores.reading import complete
from modelzoo_trainer.checkpointing.tensor_file import as_bytes, bytes_of
from modelzoo_trainer.checkpointing.tensor_header import read_header
from modelzoo_trainer.checkpointing.transaction import (
    CheckpointTransaction,
    WriteFile,
    check_step,
    plain_facts,
)
from modelzoo_trainer.errors import CheckpointError


def save(
    path: Path,
    state: Mapping[str, Any],
    *,
    step: SupportsIndex,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint atomically and durably: after a crash it is complete or absent.

    Every file, the directory and its parent are synced around one rename.

    Args:
        path: The checkpoint; must not exist.
        state: What to save; see `StateEncoder`.
        step: The global step, >= 0, for the manifest.
        facts: Additional entries of the manifest: text, numbers, lists and mappings of them.

    Raises:
        CheckpointError: If the name is in use, the state has a value that cannot be saved, or
            writing fails. Nothing is left behind.

    Cost: Host memory for one block of a tensor.
    """
    plain_step, plain = check_step(step), plain_facts(facts or {})
    encoded = StateEncoder(state)
    write_state(CheckpointTransaction(path), encoded, plain_step, plain)


def write_state(
    transaction: CheckpointTransaction,
    encoded: StateEncoder,
    step: int,
    facts: Mapping[str, Any],
    *,
    tensors: Tensors | None = None,
    by: WriteFile = write_file,
) -> None:
    """Write all files of a checkpoint and commit it.

    `tensors`: copies of the state's tensors; None = its own. `by`: what writes a file.

    Raises:
        CheckpointError: If writing fails. Nothing is left behind.
    """
    with transaction:
        text = json.dumps(encoded.state_json, allow_nan=False).encode("ascii")
        for stem, named in (encoded.tensors if tensors is None else tensors).items():
            transaction.write(f"{stem}{SUFFIX}", bytes_of(named), by)
        transaction.write(STATE, [text], by)
        transaction.commit(step=step, facts=facts)


def load(path: Path, *, keys: Collection[str] | None = None) -> dict[str, Any]:
    """Load and verify the state of a checkpoint.

    Tensors are in host memory; no file is mapped.

    Args:
        path: The checkpoint.
        keys: Keys of the state to load; only their files are read. None = all.

    Raises:
        CheckpointError: If it is damaged, has an unknown version, or is not a checkpoint.

    Cost: Reads each file once; memory for the state only.
    """
    manifest = read_manifest(path)
    if SHARDS in manifest.files:
        from modelzoo_trainer.checkpointing.sharded import load_sharded

        return load_sharded(path, manifest, keys=keys)
    check_listing(path, manifest)
    if keys is None:
        complete(path, manifest.files)
    return _load(path, manifest, keys)


def _load(path: Path, manifest: Manifest, keys: Collection[str] | None) -> dict[str, Any]:
    state_json = checked_json(path / STATE, record_of_name(manifest.files, STATE))
    if not isinstance(state_json, dict):
        raise CheckpointError(f"{str(path / STATE)!r} contains no state. Use another checkpoint.")
    files = {name for name in manifest.files if name.endswith(SUFFIX)}
    if keys is not None:
        state_json = {key: value for key, value in state_json.items() if key in keys}
        files = set(_files_of(state_json))
    tensors: Tensors = {
        name.removesuffix(SUFFIX): _tensors_of(path / name, record_of_name(manifest.files, name))
        for name in sorted(files)
    }
    return decode(state_json, tensors)


def _files_of(state_json: Any) -> Iterator[str]:
    """Yield the files of the tensors in a part of `state.json`."""
    waiting = [state_json]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if value.get("__type__") in ("tensor", "complex"):
                yield f"{value.get('file')}{SUFFIX}"
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _tensors_of(path: Path, record: FileRecord) -> dict[str, Tensor]:
    """Return the tensors of a file, each in its own memory."""
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
    """Return the problems of a checkpoint; empty if it is intact.

    Args:
        path: The checkpoint.

    Cost: Reads all files once, with constant memory.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [_text(error)]
    return verify_files(path, manifest, manifest.files)


def verify_files(path: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Return the problems of some files of a checkpoint, and of what the folder contains.

    Args:
        path: The checkpoint.
        manifest: Its manifest.
        names: Names of files, as in the manifest.

    Cost: Reads these files once, with constant memory.
    """
    files = {name: manifest.files[name] for name in sorted(names)}
    problems = listing_problems(path, manifest)
    try:
        complete(path, files)
    except CheckpointError as error:
        return [*problems, _text(error)]
    for name, record in files.items():
        if not problems or _has_its_size(path / name, record):
            problems += problems_of_file(path / name, record)
    return problems


def _has_its_size(file: Path, record: FileRecord) -> bool:
    return file.is_file() and file.lstat().st_size == record.size_bytes


def problems_of_file(path: Path, record: FileRecord) -> list[str]:
    """Return the problems of a file of a checkpoint; empty if it matches its record."""
    try:
        with open_checked(path, record) as file:
            file.parallel_read(_views(file.size))
            file.finish()
    except CheckpointError as error:
        return [_text(error)]
    return []


def _views(num_bytes: int) -> Iterator[memoryview]:
    """Yield a buffer for a file, reused after its content has been checked."""
    ring = [memoryview(bytearray(min(CHUNK, num_bytes))) for _ in range(NUM_AHEAD + 2)]
    for begin, view in zip(range(0, num_bytes, CHUNK), cycle(ring)):
        yield view[: num_bytes - begin]


def _text(error: CheckpointError) -> str:
    return str(error).removesuffix(".")
