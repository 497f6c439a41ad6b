"""Reading files once, from beginning to end: the bytes that are used are those that are checked."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import xxhash

from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.manifest import FileRecord
from modelzoo_trainer.checkpointing.parallel_read import CHUNK as CHUNK
from modelzoo_trainer.checkpointing.parallel_read import fill
from modelzoo_trainer.errors import CheckpointError

_PROBLEMS: Final = (ValueError, TypeError, LookupError, RuntimeError, RecursionError, MemoryError)


class CheckedFile:
    """A file, and the digest of what was read of it.

    Args:
        fd: Its descriptor, at its start.
        size: Its length.
        record: What was written; None = nobody knows.
    """

    def __init__(self, fd: int, size: int, record: FileRecord | None) -> None:
        if record is not None and size != record.size_bytes:
            raise ValueError(f"it has {size} bytes instead of {record.size_bytes}")
        self.size = size
        self._fd = fd
        self._record = record
        self._digest = xxhash.xxh3_128()

    def read(self, num_bytes: int) -> bytes:
        """Return the next bytes; fewer only at the end."""
        found = memoryview(bytearray(min(num_bytes, self.size)))
        found = found[: disk.read_into(self._fd, found)]
        self._digest.update(found)
        return bytes(found)

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes."""
        for begin in range(0, len(view), CHUNK):
            part = view[begin : begin + CHUNK]
            if disk.read_into(self._fd, part) != len(part):
                raise ValueError("it ends within a tensor")
            if self._record is not None:
                self._digest.update(part)

    def fill(self, views: Iterable[memoryview]) -> None:
        """Fill `views` with the next bytes, several at once; see `filling.fill`."""
        fill(self._fd, views, self._digest.update if self._record is not None else len)

    def finish(self) -> None:
        """Raise a ValueError unless everything was read, and is what was written."""
        if self.read(1):
            raise ValueError("it is longer than it was")
        if self._record is not None and self._digest.hexdigest() != self._record.xxh3_128:
            raise ValueError("it is damaged: its digest is not the one that was written")


@contextmanager
def open_checked(path: Path, record: FileRecord | None) -> Iterator[CheckedFile]:
    """Open a file for one pass; a symbolic link is refused.

    Args:
        path: The file.
        record: What was written; None = nobody knows.

    Raises:
        CheckpointError: If it cannot be read, or what is done with it raises an error that says
            that it is damaged.
    """
    try:
        if path.is_symlink():
            raise ValueError("it is a symbolic link, not a file")
        fd = disk.open_old(path)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is not a plain file")
            yield CheckedFile(fd, status.st_size, record)
        finally:
            disk.close(fd)
    except OSError as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read: {error.strerror or error}."
        ) from error
    except CheckpointError:
        raise
    except _PROBLEMS as error:
        text = str(error) if type(error) is ValueError else repr(error)
        raise CheckpointError(f"{str(path)!r} cannot be read: {text}.") from None


def checked_json(path: Path, record: FileRecord) -> Any:
    """Return what a JSON file of a checkpoint holds.

    Raises:
        CheckpointError: If it is not what was written.
    """
    with open_checked(path, record) as file:
        text = file.read(file.size)
        file.finish()
        return json.loads(text)


def record_of_name(files: Mapping[str, FileRecord], name: str) -> FileRecord:
    """Return the record of a file that another one names."""
    if name not in files:
        raise CheckpointError(f"the checkpoint names {name!r}, which is none of its files.")
    return files[name]
