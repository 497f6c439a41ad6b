"""Committing a checkpoint: all of it, or nothing."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from modelzoo_trainer.checkpointing.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    STATE,
    FileRecord,
    Manifest,
)
from modelzoo_trainer.checkpointing.skeleton import Encoder
from modelzoo_trainer.checkpointing.tensor_file import bytes_of
from modelzoo_trainer.errors import CheckpointError


def save(path: Path, state: Mapping[str, Any], *, step: int) -> None:
    """Write a checkpoint so that it is there whole, also after a power loss, or not at all.

    Every file, the directory and its parent are synchronised around one rename.

    Args:
        path: A name that is not in use.
        state: What to save; see `Encoder`.
        step: The global step, for the manifest.

    Raises:
        CheckpointError: If the name is in use, the state has something that cannot be saved, or
            the disk refuses. Nothing is left behind then.
    """
    temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
    try:
        _check_free(path)
        encoded = Encoder(state)
        _make_folder(path.parent)
        temporary.mkdir()
        _write_files(temporary, encoded, step)
        _commit(temporary, path)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"checkpoint {str(path)!r} could not be written: {error.strerror or error}. "
            f"Earlier ones are untouched."
        ) from error


def _check_free(path: Path) -> None:
    if os.path.lexists(path):
        raise CheckpointError(f"{str(path)!r} exists; checkpoints are never overwritten.")


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, safe from a power loss."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _write_files(folder: Path, encoded: Encoder, step: int) -> None:
    files = {}
    for stem, tensors in encoded.tensors.items():
        name = f"{stem}.safetensors"
        files[name] = _write(folder / name, bytes_of(tensors))
    skeleton = json.dumps(encoded.skeleton, allow_nan=False)
    files[STATE] = _write(folder / STATE, [skeleton.encode("ascii")])
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        step=step,
        versions={"torch": str(torch.__version__), "numpy": np.__version__},
        files=files,
    )
    _write(folder / MANIFEST, [manifest.to_json().encode("ascii")])
    _sync(folder)


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file; its record is of what was handed over, not of what a disk made of it."""
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            size += file.write(chunk)
    _sync(path)
    return FileRecord(size_bytes=size, xxh3_128=digest.hexdigest())


def _commit(temporary: Path, path: Path) -> None:
    """Give the directory its name, and take it back if that may not last."""
    _check_free(path)  # again: a rename would replace an empty directory
    temporary.rename(path)
    try:
        _sync(path.parent)
    except OSError:
        with suppress(OSError):
            path.rename(temporary)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
