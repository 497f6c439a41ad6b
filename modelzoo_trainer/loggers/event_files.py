"""Cut TensorBoard's event files back to a checkpoint."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.loggers.file_logger import is_test

Ends = dict[str, int]
"""The lengths of event files, by their paths below the logger's folder."""
Value = tuple[int, str, float]
"""Step, name and value of a number."""

_HEAD: Final = struct.Struct("<QI")  # of a record: the length of its data, and a checksum of that
_TAIL_BYTES: Final = 4  # a checksum of the data


def event_files(root: Path, folders: Iterable[str]) -> list[Path]:
    """Return the event files in some folders below a root, sorted in each."""
    return [path for name in folders for path in sorted((root / name).glob("*.tfevents.*"))]


def ends_of(root: Path, files: Iterable[Path]) -> Ends:
    """Return the length of each file."""
    return {file.relative_to(root).as_posix(): file.stat().st_size for file in files}


def are_at(ends: Mapping[str, int], marked: Mapping[str, int]) -> bool:
    """Return whether files continue a mark's files; without any they cannot be identified."""
    return bool(marked) and all(ends.get(name, -1) >= size for name, size in marked.items())


def cut(file: Path, start: int, stop: int, step: int) -> list[Value]:
    """Remove the events between two offsets, but keep results of `trainer.test` up to a step.

    Returns:
        The numbers among these results.
    """
    kept, values = b"", []
    with file.open("rb+") as opened:
        opened.seek(start)
        content = opened.read(stop - start)
        rest = opened.read()
        for raw, event in _records(content):
            names = [value.tag for value in event.summary.value]
            if not names or (is_test(names) and event.step <= step):
                kept += raw
                values += [(event.step, one.tag, one.simple_value) for one in event.summary.value]
        if len(kept) < stop - start:
            opened.seek(start)
            opened.truncate()
            opened.write(kept + rest)
            opened.flush()
            os.fsync(opened.fileno())
    return values


def _records(content: bytes) -> Iterator[tuple[bytes, Any]]:
    """Yield the records of an event file, with the event in each, up to a damaged one."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    parse: Callable[[bytes], Any] = Event.FromString
    at = 0
    while at + _HEAD.size <= len(content):
        num_bytes, _ = _HEAD.unpack_from(content, at)
        first = at + _HEAD.size
        end = first + num_bytes + _TAIL_BYTES
        if end > len(content):
            return
        try:
            event = parse(content[first : first + num_bytes])
        except DecodeError:  # TensorBoard stops there, too
            return
        yield content[at:end], event
        at = end
