"""Committing a checkpoint: all of it, or nothing."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import save_file

from modelzoo_trainer.checkpointing.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    STATE,
    Manifest,
    record_of,
)
from modelzoo_trainer.checkpointing.skeleton import Encoder, tensor_files
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
    if path.exists():
        raise CheckpointError(f"{str(path)!r} exists; checkpoints are never overwritten.")
    encoded = Encoder(state)
    temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        _write_files(temporary, encoded, step)
        temporary.rename(path)
        _sync(path.parent)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            f"checkpoint {str(path)!r} could not be written: {reason}. Earlier ones are untouched."
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_files(folder: Path, encoded: Encoder, step: int) -> None:
    for name, tensors in tensor_files(encoded.tensors):
        save_file(tensors, folder / name)
    (folder / STATE).write_text(json.dumps(encoded.skeleton, allow_nan=False), encoding="utf-8")
    mode = _plain_mode(folder / STATE)
    files = {}
    for file in sorted(folder.iterdir()):
        file.chmod(mode)  # safetensors makes its files readable by their owner alone
        files[file.name] = record_of(file)
        _sync(file)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        step=step,
        versions={
            "torch": torch.__version__,
            "numpy": np.__version__,
            "safetensors": safetensors.__version__,
        },
        files=files,
    )
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    _sync(folder / MANIFEST)
    _sync(folder)


def _plain_mode(file: Path) -> int:
    """Return the mode that an ordinary new file gets here."""
    return file.stat().st_mode & 0o777


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
