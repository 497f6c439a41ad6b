"""Checking a checkpoint against its manifest, without loading it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from modelzoo_trainer.checkpointing.checked_file import open_checked
from modelzoo_trainer.checkpointing.files import listing_problems
from modelzoo_trainer.checkpointing.manifest import FileRecord, read_manifest
from modelzoo_trainer.checkpointing.parallel_read import CHUNK, NUM_AHEAD
from modelzoo_trainer.errors import CheckpointError


def verify(path: Path) -> list[str]:
    """Return what is wrong with a checkpoint; an empty list if it is intact.

    Args:
        path: Its directory.

    Cost: Reads all files once, in memory that does not grow with them.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [_text(error)]
    problems = listing_problems(path, manifest)
    for name, record in sorted(manifest.files.items()):
        if not problems or _has_its_size(path / name, record):
            problems += _problems(path / name, record)
    return problems


def _has_its_size(file: Path, record: FileRecord) -> bool:
    return file.is_file() and file.lstat().st_size == record.size_bytes


def _problems(path: Path, record: FileRecord) -> list[str]:
    try:
        with open_checked(path, record) as file:
            file.fill(_views(file.size))
            file.finish()
    except CheckpointError as error:
        return [_text(error)]
    return []


def _views(num_bytes: int) -> Iterator[memoryview]:
    """Yield room for a file, the same again when what was read into it has been looked at."""
    ring = [memoryview(bytearray(min(CHUNK, num_bytes))) for _ in range(NUM_AHEAD + 2)]
    for begin, view in zip(range(0, num_bytes, CHUNK), cycle(ring)):
        yield view[: num_bytes - begin]


def _text(error: CheckpointError) -> str:
    return str(error).removesuffix(".")
