"""Write one file durably, with its digest. Imports no torch: a process that only writes uses it."""

from __future__ import annotations

from collections.abc import Iterable
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
    digest = xxhash.xxh3_128()
    size = 0
    fd = disk.open_new(path)
    try:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for begin in range(0, len(view), _PIECE):
                piece = view[begin : begin + _PIECE]
                digest.update(piece)
                disk.write(fd, piece)
                size += len(piece)
                if len(piece) == _PIECE:
                    disk.start_writing_back(fd, size - _PIECE, _PIECE)
        disk.sync(fd)
    except BaseException:
        with suppress(OSError):  # keep the first error
            disk.close(fd)
        raise
    disk.close(fd)
    return FileRecord(size_bytes=size, xxh3_128=digest.hexdigest())
