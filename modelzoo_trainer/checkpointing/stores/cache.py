"""Keep the local copy small: files of checkpoints that are in the store may be removed here."""

from __future__ import annotations

import logging
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from modelzoo_trainer.base.regular_files import read_bytes
from modelzoo_trainer.checkpointing.stores.mirror import (
    MANIFEST,
    Mirror,
    attempt_of,
    checkpoints_in,
    files_of,
)
from modelzoo_trainer.checkpointing.stores.record import MirrorRecord

log = logging.getLogger("modelzoo_trainer.stores")

_HEADROOM_BYTES: Final = 1 << 24
_OLD_S: Final = 86_400.0


def clean(mirror: Mirror) -> None:
    """Remove what killed processes have left in the hidden folder; for the one that uploads.

    Links of an upload keep the space of deleted checkpoints. Downloads may belong to other runs.
    """
    now = time.time()
    for path in list(mirror.folder.iterdir()):
        with suppress(OSError):
            is_old = path.stat().st_mtime < now - _OLD_S
            if path.name.startswith("upload-") or (is_old and path.name.startswith("stub-")):
                shutil.rmtree(path)
            elif is_old and path.name.startswith("download-"):
                path.unlink()


class _Copy:
    """The local copy of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [path / name for name in files_of(path) if (path / name).exists()]
        self.num_bytes = sum(file.stat().st_size for file in self.files)
        self.written = (path / MANIFEST).stat().st_mtime_ns

    def remove(self) -> None:
        """Remove the files; the manifest stays, so that they are downloaded when needed."""
        for file in self.files:
            file.unlink(missing_ok=True)
        log.debug("Removed the local copy of %s (%.1f MB).", self.path, self.num_bytes / 1e6)


def _copies(mirror: Mirror, record: MirrorRecord) -> list[_Copy]:
    """Return the local copies of checkpoints that are in the store, the oldest first."""
    found = []
    for name in checkpoints_in(mirror):
        path = mirror.path / name
        with suppress(OSError, ValueError):
            if record.checkpoints.get(name) == attempt_of(read_bytes(path / MANIFEST)):
                found.append(_Copy(path))
    return sorted(found, key=lambda copy: copy.written)


def bound(mirror: Mirror, record: MirrorRecord, limit_bytes: int | None) -> None:
    """Remove the oldest local copies until all take at most `limit_bytes`; the newest one stays.

    A process that reads one of them has it open, or downloads it again.

    `limit_bytes`: None = the size of the two newest ones.
    """
    copies = _copies(mirror, record)
    limit = sum(copy.num_bytes for copy in copies[-2:]) if limit_bytes is None else limit_bytes
    total = sum(copy.num_bytes for copy in copies)
    for copy in copies[:-1]:
        if total <= limit:
            return
        copy.remove()
        total -= copy.num_bytes


def make_room(mirror: Mirror, num_bytes: int, *, keep: Path | None = None) -> bool:
    """Remove the oldest local copies until there is space for this much; return whether there is.

    `keep`: a checkpoint that is about to be read.
    """
    needed = num_bytes + _HEADROOM_BYTES
    if _free(mirror) >= needed:
        return True
    for copy in _copies(mirror, MirrorRecord.read(mirror.folder)):
        if keep is None or copy.path != keep:
            copy.remove()
            if _free(mirror) >= needed:
                return True
    return _free(mirror) >= needed


def _free(mirror: Mirror) -> int:
    try:
        return shutil.disk_usage(mirror.path).free
    except OSError:
        return 1 << 62  # not known: the download itself will find out
