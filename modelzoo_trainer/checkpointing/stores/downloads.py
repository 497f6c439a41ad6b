"""Write an object to a file in parallel ranges."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import xxhash

RANGE_BYTES: Final = 8 << 20
_CONCURRENT: Final = 8
"""Ranges in memory at a time."""


def download_ranges(
    read: Callable[[int, int], Any], file: Path, size_bytes: int, xxh3_128: str | None
) -> bool:
    """Write ranges to a new file durably, in order.

    Args:
        read: Returns the bytes from a first position to one after the last.
        file: Path of the file.
        size_bytes: Its size.
        xxh3_128: Its checksum.

    Returns:
        Whether the content matches; if not, or after an error, there is no file.

    Raises:
        FileExistsError: If the file exists.
        OSError: If it cannot be written.
    """
    fd = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    is_complete = False
    try:
        found = _write(fd, read, size_bytes)
        is_complete = xxh3_128 is None or found == xxh3_128
        if is_complete:
            os.fsync(fd)
    finally:
        os.close(fd)
        if not is_complete:
            file.unlink(missing_ok=True)
    return is_complete


def _write(fd: int, read: Callable[[int, int], Any], size_bytes: int) -> str:
    """Write all ranges and return the checksum."""
    _reserve(fd, size_bytes)
    digest = xxhash.xxh3_128()
    begins = iter(range(0, size_bytes, RANGE_BYTES))
    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(_CONCURRENT, thread_name_prefix="download") as pool:

        def submit() -> None:
            begin = next(begins, None)
            if begin is not None:
                waiting.append(pool.submit(read, begin, min(begin + RANGE_BYTES, size_bytes)))

        for _ in range(_CONCURRENT):
            submit()
        try:
            while waiting:
                view = memoryview(waiting.popleft().result())
                submit()
                digest.update(view)
                while view:
                    view = view[os.write(fd, view) :]
        finally:
            for future in waiting:
                future.cancel()
    return digest.hexdigest()


def _reserve(fd: int, size_bytes: int) -> None:
    """Find out before the download whether the disk has the space."""
    if size_bytes and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
