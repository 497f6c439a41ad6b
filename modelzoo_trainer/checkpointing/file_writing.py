"""Write one file durably, with its digest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.manifest import FileRecord

_PIECE: Final = 1 << 23  # bytes hashed and written while they are in the cache


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file durably and return its record.

    Hashing, copying and the disk overlap: writing starts with the first piece.

    Raises:
        OSError: If writing fails.
    """
    fd = disk.open_new(path)
    try:
        record = write_hashed(
            fd, chunks, _PIECE, lambda end: disk.start_writing_back(fd, end - _PIECE, _PIECE)
        )
        disk.sync(fd)
    except BaseException:
        with suppress(OSError):  # keep the first error
            disk.close(fd)
        raise
    disk.close(fd)
    return record


def write_hashed(
    fd: int,
    chunks: Iterable[bytes | memoryview],
    piece_bytes: int,
    after: Callable[[int], None] | None = None,
) -> FileRecord:
    """Write and hash an open file piece by piece, and return its record.

    `after`: called after each whole piece with the number of bytes written so far.

    Raises:
        OSError: If writing fails.
    """
    digest = xxhash.xxh3_128()
    size = 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for begin in range(0, len(view), piece_bytes):
            piece = view[begin : begin + piece_bytes]
            digest.update(piece)
            disk.write(fd, piece)
            size += len(piece)
            if after is not None and len(piece) == piece_bytes:
                after(size)
    return FileRecord(size_bytes=size, xxh3_128=digest.hexdigest())
