"""What a mirror knows of its store: uploaded checkpoints and files, and deletions to repeat there.

One process writes it, the one that uploads; the others may read.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from modelzoo_trainer.base.regular_files import read_bytes

_RECORD: Final = "record.json"
_DELETED: Final = "deleted"


@dataclass(slots=True)
class SentFile:
    """A file of the mirror as it was when it was uploaded or downloaded."""

    size_bytes: int
    mtime_ns: int
    xxh3_128: str
    modified: float | None = None  # by the clock of the store; None = not known


@dataclass(slots=True)
class MirrorRecord:
    """What of a mirror is in the store, by path relative to the mirror."""

    folder: Path
    checkpoints: dict[str, str] = field(default_factory=dict)  # digests of manifests
    files: dict[str, SentFile] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> MirrorRecord:
        """Read the record; an unreadable one is empty: everything is compared again."""
        record = cls(folder)
        with suppress(OSError, ValueError, TypeError, AttributeError, LookupError):
            raw: dict[str, Any] = json.loads(read_bytes(folder / _RECORD))
            files = {name: SentFile(**sent) for name, sent in raw["files"].items()}
            record.checkpoints = {str(name): str(tag) for name, tag in raw["checkpoints"].items()}
            record.files = files
        return record

    def write(self) -> None:
        """Write the record atomically.

        Raises:
            OSError: If writing fails.
        """
        raw = {
            "checkpoints": self.checkpoints,
            "files": {name: asdict(sent) for name, sent in self.files.items()},
        }
        write_atomically(self.folder / _RECORD, json.dumps(raw).encode())


@dataclass(frozen=True, slots=True)
class Deletion:
    """A checkpoint that was deleted here and is to be deleted from the store."""

    name: str
    attempt: str  # another checkpoint of this name stays
    note: Path  # the file that notes it


def note_deleted(folder: Path, name: str, attempt: str) -> None:
    """Note that a checkpoint is to be deleted from the store, durably.

    Raises:
        OSError: If writing fails.
    """
    place = folder / _DELETED
    place.mkdir(parents=True, exist_ok=True)
    file = f"{quote(name, safe='')}.{attempt}.{secrets.token_hex(4)}"
    write_atomically(place / file, b"")


def deletions(folder: Path) -> list[Deletion]:
    """Return the checkpoints to delete from the store."""
    try:
        paths = sorted((folder / _DELETED).iterdir())
    except OSError:
        return []
    found = []
    for path in paths:
        quoted, attempt, *_ = [*path.name.rsplit(".", 2), "", ""]
        if quoted and not path.name.startswith("."):
            found.append(Deletion(unquote(quoted), attempt, path))
    return found


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small file durably, or leave the old one.

    Raises:
        OSError: If writing fails.
    """
    fresh = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with fresh.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
