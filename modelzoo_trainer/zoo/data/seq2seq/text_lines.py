"""Lines of text files, found by their positions and read one at a time."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.zoo.data.folders import MetaLine
from modelzoo_trainer.zoo.data.stream_processor import say_once

_DIGEST_BYTES: Final = 4
_MARK: Final = 4096  # pieces between two positions that are kept of a long line
_PIECE: Final = re.compile(r"\S+")  # as str.split() finds them
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
        marks: Where each 4096th piece of a long line begins, from the start of the line; by line.

    Shapes:
        starts: (lines + 1,). num_pieces: (lines,).
    """

    path: str
    size: int
    mtime_ns: int
    starts: Ints
    num_pieces: Ints
    marks: Mapping[int, Ints]


def index_file(path: str) -> TextFile:
    """Return where the lines of a file are; the file is read once by a process.

    Raises:
        ConfigError: If it cannot be read, or is not UTF-8.

    Cost:
        Reads the whole file, about 100 MB per second; keeps 16 bytes per line, and 8 per 4096
        pieces of a long one.
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
    marks: dict[int, Ints] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            lengths.append(len(line))
            text = _text(line, path, number)
            counts.append(len(text.split()))
            if counts[-1] > _MARK:
                marks[number - 1] = _marks(text)
    starts = np.cumsum(lengths, dtype=np.int64)
    return TextFile(path, size, mtime_ns, starts, np.asarray(counts, dtype=np.int64), marks)


def _marks(text: str) -> Ints:
    """Return the position in bytes of each 4096th piece."""
    places = [match.start() for match in islice(_PIECE.finditer(text), 0, None, _MARK)]
    sizes = [
        len(text[start:stop].encode())
        for start, stop in zip([0, *places[:-1]], places, strict=True)
    ]
    return np.cumsum(sizes, dtype=np.int64)


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
    if num != meta.num_rows:
        say_once(
            f"{meta.place}: {found.path} has {num} lines, not {meta.num_rows}; all of its lines "
            f"are used.",
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
            file, within = self._place(line)
            start, stop = (int(one) for one in file.starts[within : within + 2])
            texts.append(self._text(file, within, start, stop))
        return texts

    def read_pieces(self, line: int, first: int, last: int) -> tuple[str, int]:
        """Return a part of a line with the pieces [first, last), and how many precede them in it.

        Raises:
            ConfigError: As `read`.

        Cost:
            Of a long line, reads less than 8192 pieces more than those.
        """
        file, within = self._place(line)
        start, stop = (int(one) for one in file.starts[within : within + 2])
        marks = file.marks.get(within)
        if marks is None:
            return self._text(file, within, start, stop), first
        before, after = first // _MARK, -(-last // _MARK)
        if after < len(marks):
            stop = start + int(marks[after])
        return self._text(file, within, start + int(marks[before]), stop), first - before * _MARK

    def _place(self, line: int) -> tuple[TextFile, int]:
        """Return the file of a line, and its number in the file, from 0."""
        number = int(np.searchsorted(self._ends, line, side="right"))
        file = self.files[number]
        return file, line - int(self._ends[number]) + len(file.num_pieces)

    @staticmethod
    def _text(file: TextFile, line: int, start: int, stop: int) -> str:
        try:
            with open(file.path, "rb") as opened:
                _check_unchanged(file, os.fstat(opened.fileno()))
                opened.seek(start)
                found = opened.read(stop - start)
        except OSError as error:
            raise ConfigError(f"{file.path} cannot be read: {reason_of(error)}.") from error
        return _text(found, file.path, line + 1)

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
