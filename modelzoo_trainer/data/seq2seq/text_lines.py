"""Lines of text files, found by their positions and read one at a time."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modelzoo_trainer.data.folders import MetaLine
from modelzoo_trainer.data.stream_processor import say_once
from modelzoo_trainer.errors import ConfigError, reason_of

_DIGEST_BYTES: Final = 4
_INDEXED: Final[dict[tuple[str, int, int], TextFile]] = {}
"""Files indexed by this process: a dataloader is created for each validation."""

Ints = NDArray[np.int64]


class TextFile(NamedTuple):
    """Where the lines of a file are.

    Args:
        path: The file.
        size: Bytes of the file.
        mtime_ns: When it was changed.
        starts: Position of each line, and of the end of the file.
        num_pieces: Pieces of text of each line, which blanks separate.

    Shapes:
        starts: (lines + 1,). num_pieces: (lines,).
    """

    path: str
    size: int
    mtime_ns: int
    starts: Ints
    num_pieces: Ints


def index_file(path: str) -> TextFile:
    """Return where the lines of a file are; the file is read once by a process.

    Raises:
        ConfigError: If it cannot be read, or is not UTF-8.

    Cost:
        Reads the whole file, about 100 MB per second; keeps 16 bytes per line.
    """
    try:
        found = Path(path).stat()
        key = (path, found.st_size, found.st_mtime_ns)
        if key not in _INDEXED:
            _INDEXED[key] = _indexed(*key)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}.") from error
    return _INDEXED[key]


def _indexed(path: str, size: int, mtime_ns: int) -> TextFile:
    lengths, counts = [0], []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            lengths.append(len(line))
            counts.append(len(_text(line, path, number).split()))
    starts = np.cumsum(lengths, dtype=np.int64)
    return TextFile(path, size, mtime_ns, starts, np.asarray(counts, dtype=np.int64))


def _text(line: bytes, path: str, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}:{number}: not UTF-8 text ({error}). Convert the file."
        ) from error


def warn_of_count(meta: MetaLine, found: TextFile) -> None:
    """Warn once if a file has another number of lines than `meta.dat` says."""
    num = len(found.num_pieces)
    if num != meta.count:
        say_once(
            f"{meta.place}: {found.path} has {num} lines, not {meta.count}; all of its lines are "
            f"used.",
            logging.WARNING,
        )


class TextLines:
    """The lines of several files, one after the other."""

    def __init__(self, files: Sequence[TextFile]) -> None:
        self.files = tuple(files)
        self.num_pieces: Ints = np.concatenate([one.num_pieces for one in files])
        """Pieces of text of each line."""
        self._ends = np.cumsum([len(one.num_pieces) for one in files], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.num_pieces)

    def read(self, lines: Iterable[int]) -> list[str]:
        """Return lines by their numbers.

        Raises:
            ConfigError: If a file cannot be read, or has changed since it was indexed.
        """
        texts = []
        for line in lines:
            number = int(np.searchsorted(self._ends, line, side="right"))
            file = self.files[number]
            within = line - int(self._ends[number]) + len(file.num_pieces)
            start, stop = (int(one) for one in file.starts[within : within + 2])
            try:
                with open(file.path, "rb") as opened:
                    _check_unchanged(file, os.fstat(opened.fileno()))
                    opened.seek(start)
                    found = opened.read(stop - start)
            except OSError as error:
                raise ConfigError(f"{file.path} cannot be read: {reason_of(error)}.") from error
            texts.append(_text(found, file.path, within + 1))
        return texts

    def check_unchanged(self) -> None:
        """Check that the files are as they were when they were indexed.

        Raises:
            ConfigError: With the file that has changed.
        """
        for file in self.files:
            try:
                found = Path(file.path).stat()
            except OSError as error:
                raise ConfigError(f"{file.path} cannot be read: {reason_of(error)}.") from error
            _check_unchanged(file, found)


def _check_unchanged(file: TextFile, found: os.stat_result) -> None:
    if (found.st_size, found.st_mtime_ns) != (file.size, file.mtime_ns):
        raise ConfigError(
            f"{file.path} has changed since the run began. Restore it, or start the run again."
        )


def fingerprint_of(lines: Iterable[TextLines], *others: object) -> int:
    """Return a number that changes with names, sizes and pieces of files, and with `others`."""
    digest = hashlib.blake2b(repr(others).encode(), digest_size=_DIGEST_BYTES)
    for one in lines:
        for file in one.files:
            name = Path(file.path).name
            digest.update(repr((name, file.size)).encode())
            digest.update(file.num_pieces.astype("<i8").tobytes())
    return int.from_bytes(digest.digest(), "big")
