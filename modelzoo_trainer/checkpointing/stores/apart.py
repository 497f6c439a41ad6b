"""Processes on other hosts, which do not see the local copy of the process that uploads.

Each host has a local copy of its own. When a checkpoint is saved, such a process uploads its files
itself, before the manifest is written; its name of the attempt is part of the manifest. Before one
is loaded, the manifest is brought to its copy.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from modelzoo_trainer.base.regular_files import read_bytes
from modelzoo_trainer.checkpointing.stores.cache import bound
from modelzoo_trainer.checkpointing.stores.mirror import (
    MANIFEST,
    NUM_DIGITS,
    Mirror,
    attempt_of,
    located,
    mirror_of,
)
from modelzoo_trainer.checkpointing.stores.pulling import fetch, make_stub
from modelzoo_trainer.checkpointing.stores.reading import SizeAndDigest, alone
from modelzoo_trainer.checkpointing.stores.record import MirrorRecord
from modelzoo_trainer.errors import CheckpointError

_SHARE: Final = "share-"


def lies_apart(path: Path) -> bool:
    """Return whether the process that uploads does not see this path."""
    mirror = mirror_of(path)
    return mirror is not None and mirror.is_apart


def attempt_for(path: Path) -> str:
    """Return a new name of an attempt if processes upload files of a checkpoint; else ""."""
    mirror, name = located(path)
    if mirror is None or not mirror.is_split or not name:
        return ""
    return secrets.token_hex(NUM_DIGITS // 2)


@contextmanager
def folder_for_upload(path: Path) -> Iterator[Path]:
    """Yield a new folder for files of a checkpoint, which is removed afterwards."""
    folder = _mirror(path).folder / f"{_SHARE}{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def upload(path: Path, attempt: str, folder: Path, files: Mapping[str, SizeAndDigest]) -> None:
    """Upload files of a checkpoint.

    Args:
        path: The checkpoint, in a mirror.
        attempt: The name of the attempt, the same in all processes.
        folder: Where the files are.
        files: Their records.

    Raises:
        StoreError: If the store does not take one.
        OSError: If one cannot be read.
    """
    mirror = _mirror(path)
    name = mirror.name_of(path)
    for file, record in sorted(files.items()):
        mirror.store.put(f"{name}/{attempt}/{file}", folder / file, xxh3_128=record.xxh3_128)


def _mirror(path: Path) -> Mirror:
    mirror = mirror_of(path)
    if mirror is None:
        raise CheckpointError(f"{str(path)!r} is not in the local copy of an object store.")
    return mirror


def bring(mirror: Mirror, name: str, attempt: str | None) -> None:
    """Make the manifest of a checkpoint of the store the one in this mirror.

    What is here under that name and differs is removed, or set aside if it was never uploaded.

    `attempt`: of the checkpoint in the copy of the process that uploads; None = it is a file or a
    folder of weights.

    Raises:
        CheckpointError: If the store has another one.
        StoreError: If the store cannot be read.
        OSError: If the mirror cannot be written.
    """
    path = mirror.path / name
    if attempt is None:
        if not os.path.lexists(path):
            fetch(mirror, name)
        return
    with alone(mirror, name):  # by one process of this host
        if _attempt_here(path) == attempt:
            return
        text = mirror.store.read(f"{name}/{MANIFEST}")[0]
        if attempt_of(text) != attempt:
            raise CheckpointError(
                f"{mirror.url_of(name)} is not the checkpoint that the main process has in its "
                f"local copy. Is another run using {mirror.url}?"
            )
        make_stub(mirror, name, text, owns=True)
        record = MirrorRecord.read(mirror.folder)
        record.checkpoints[name] = attempt
        record.write()
        bound(mirror, record, None)


def _attempt_here(path: Path) -> str | None:
    try:
        return attempt_of(read_bytes(path / MANIFEST))
    except OSError:
        return None


def remove_leftovers(mirror: Mirror) -> None:
    """Remove what killed processes of this host were uploading."""
    for folder in mirror.folder.glob(f"{_SHARE}*"):
        with suppress(ValueError, OSError):
            if _is_dead(int(folder.name.split("-")[1])):
                shutil.rmtree(folder, ignore_errors=True)


def _is_dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return pid == os.getpid()  # an earlier one had the same number
