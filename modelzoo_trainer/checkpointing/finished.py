"""Record which checkpoints are the last of a finished fit(), in a file beside them.

A checkpoint is committed before the validation that follows it, and immutable afterwards.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.file_writing import write_file
from modelzoo_trainer.checkpointing.folder import hidden_name
from modelzoo_trainer.checkpointing.manifest import MANIFEST, record_of, text_of
from modelzoo_trainer.errors import CheckpointError

FINISHED: Final = ".finished.json"


def note_finished(path: Path) -> None:
    """Record that the fit() with this last checkpoint has finished.

    Raises:
        CheckpointError: If writing fails.
    """
    try:
        noted = {path.name: record_of(path / MANIFEST).xxh3_128}
        if not noted.items() <= _noted(path.parent).items():
            _write(path.parent, _existing(path.parent) | noted)
    except OSError as error:
        raise CheckpointError(
            f"{str(path.parent / FINISHED)!r} cannot be written: {error.strerror or error}."
        ) from error


def is_finished(path: Path) -> bool:
    """Return whether the fit() with this last checkpoint has finished."""
    digest = _noted(path.parent).get(path.name)
    return digest is not None and digest == record_of(path / MANIFEST).xxh3_128


def forget_deleted(folder: Path) -> None:
    """Drop records of deleted checkpoints: others may reuse their names.

    Raises:
        CheckpointError: If writing fails.
    """
    existing = _existing(folder)
    if existing != _noted(folder):
        try:
            _write(folder, existing)
        except OSError as error:
            raise CheckpointError(
                f"{str(folder / FINISHED)!r} cannot be written: {error.strerror or error}."
            ) from error


def _existing(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in _noted(folder).items() if (folder / name).is_dir()}


def _noted(folder: Path) -> dict[str, str]:
    """Return the digests of manifests by checkpoint name; empty if the file is damaged."""
    try:
        noted = json.loads(text_of(folder / FINISHED))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(noted, dict):
        return {}
    return {name: digest for name, digest in noted.items() if isinstance(digest, str)}


def _write(folder: Path, noted: dict[str, str]) -> None:
    fresh = folder / hidden_name("tmp", FINISHED)
    write_file(fresh, [json.dumps(noted, indent=1).encode("ascii")])
    disk.rename(fresh, folder / FINISHED)
    disk.sync_folder(folder)
