"""Read files once with several threads, and verify the same bytes that are used."""

from __future__ import annotations

import json
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import xxhash

from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.manifest import FileRecord
from modelzoo_trainer.checkpointing.stores.reading import opened
from modelzoo_trainer.errors import CheckpointError, StoreError, reason_of

CHUNK: Final = 1 << 22  # bytes per read, hashed while they are in the cache
NUM_AHEAD: Final = 8  # chunks read ahead
_NUM_THREADS: Final = 2  # one waits for the disk while another copies; the caller hashes
_MAX_VIEWS: Final = 512  # the system accepts at most 1024 per call

_TOO_SHORT: Final = "the file is shorter than expected"

_Job: TypeAlias = list[memoryview]


def parallel_read(
    fd: int, views: Iterable[memoryview], look: Callable[[memoryview], object]
) -> None:
    """Fill `views` with the next bytes of a file.

    `views`: destinations, consumed in order, at most `NUM_AHEAD` chunks early. `look`: called with
    the data read, in order, in the calling thread.

    Raises:
        ValueError: If the file ends before all views are full.
        OSError: If reading fails.
    """
    position = os.lseek(fd, 0, os.SEEK_CUR)
    waiting: deque[tuple[_Job, Future[None]]] = deque()
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        try:
            for job in _jobs(views):
                if len(waiting) == NUM_AHEAD:
                    _take(waiting, look)
                waiting.append((job, pool.submit(_read, fd, job, position)))
                position += sum(map(len, job))
            while waiting:
                _take(waiting, look)
        finally:
            for _, future in waiting:
                future.cancel()
    os.lseek(fd, position, os.SEEK_SET)


def _jobs(views: Iterable[memoryview]) -> Iterator[_Job]:
    """Group views into chunks: split large ones, gather small ones."""
    job: _Job = []
    room = CHUNK
    for view in views:
        for begin in range(0, len(view), CHUNK):
            part = view[begin : begin + CHUNK]
            if job and (len(part) > room or len(job) == _MAX_VIEWS):
                yield job
                job, room = [], CHUNK
            job.append(part)
            room -= len(part)
    if job:
        yield job


def _read(fd: int, job: _Job, position: int) -> None:
    if disk.read_at(fd, job, position) != sum(map(len, job)):
        raise ValueError(_TOO_SHORT)


def _take(waiting: deque[tuple[_Job, Future[None]]], look: Callable[[memoryview], object]) -> None:
    job, future = waiting.popleft()
    future.result()
    for view in job:
        look(view)


_PROBLEMS: Final = (ValueError, TypeError, LookupError, RuntimeError, RecursionError, MemoryError)


class CheckedFile:
    """A file, and the digest of the part read so far.

    `record`: the size and digest when written; None = not known.
    """

    def __init__(self, fd: int, size: int, record: FileRecord | None) -> None:
        if record is not None and size != record.size_bytes:
            raise ValueError(
                f"the file has {size} bytes, expected {record.size_bytes}; it is truncated or "
                f"damaged"
            )
        self.size = size
        self.fd = fd
        self._record = record
        self._digest = xxhash.xxh3_128()

    def read(self, num_bytes: int) -> bytes:
        """Return the next bytes; fewer only at the end."""
        found = memoryview(bytearray(min(num_bytes, self.size)))
        found = found[: disk.read_into(self.fd, found)]
        self._digest.update(found)
        return bytes(found)

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes."""
        for begin in range(0, len(view), CHUNK):
            part = view[begin : begin + CHUNK]
            if disk.read_into(self.fd, part) != len(part):
                raise ValueError(_TOO_SHORT)
            if self._record is not None:
                self._digest.update(part)

    def parallel_read(self, views: Iterable[memoryview]) -> None:
        """Fill `views` with the next bytes, in parallel; see `parallel_read`."""
        parallel_read(self.fd, views, self._digest.update if self._record is not None else len)

    def finish(self) -> None:
        """Raise ValueError unless the whole file was read and matches its record."""
        if self.read(1):
            raise ValueError("the file is longer than expected")
        if self._record is not None and self._digest.hexdigest() != self._record.xxh3_128:
            raise ValueError("the file is damaged (checksum mismatch)")


@contextmanager
def open_checked(path: Path, record: FileRecord | None) -> Iterator[CheckedFile]:
    """Open a file to read it once; refuse symbolic links.

    `record`: the size and digest when written; None = not known.

    Raises:
        CheckpointError: If it cannot be read, or the `with` block raises an error for damaged
            content.
        StoreError: If it must be downloaded, and the store cannot be read.
    """
    try:
        if path.is_symlink():
            raise ValueError("it is a symbolic link, not a regular file")
        files = {} if record is None else {path.name: record}
        fd = opened(path.parent, files, partial(disk.open_old, path))
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is not a regular file")
            yield CheckedFile(fd, status.st_size, record)
        finally:
            disk.close(fd)
    except StoreError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read: {reason_of(error)}. Check that it exists and is "
            f"readable."
        ) from error
    except CheckpointError:
        raise
    except _PROBLEMS as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {reason_of(error)}.") from None


def checked_json(path: Path, record: FileRecord) -> Any:
    """Return the content of a JSON file of a checkpoint.

    Raises:
        CheckpointError: If it does not match its record.
    """
    with open_checked(path, record) as file:
        text = file.read(file.size)
        file.finish()
        return json.loads(text)


def record_of_name(files: Mapping[str, FileRecord], name: str) -> FileRecord:
    """Return the record of a file that another file refers to."""
    if name not in files:
        raise CheckpointError(
            f"The checkpoint is damaged: it refers to the file {name!r}, which its manifest does "
            f"not list. Use another checkpoint."
        )
    return files[name]
