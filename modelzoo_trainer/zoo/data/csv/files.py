"""CSV files of folders: which there are, where their rows begin, whether they change."""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.zoo.data.folders import META, NamedFiles, read_meta

_AGAIN: Final = "Prepare the data again."
_CHUNK: Final = 1 << 24  # bytes scanned at a time
_NEWLINE, _QUOTE = 10, 34
_DIGEST_BYTES: Final = 4

Ints = NDArray[np.int64]


class CsvFile(NamedTuple):
    """What is known of a file without reading it.

    Args:
        path: As `data_dir` gives it.
        size: Bytes of the file.
        mtime_ns: When it was changed.
        num_rows: Rows after the header.
    """

    path: str
    size: int
    mtime_ns: int
    num_rows: int


class Index(NamedTuple):
    """Where the rows of a file are: row i is [bounds[i, 0], bounds[i, 1]); the header is row 0."""

    bounds: Ints
    columns: tuple[str, ...]


_INDICES: Final[dict[tuple[str, int, int, bool, str], Index]] = {}
"""Of files that this process has read, as it read them: each validation creates a dataloader."""


def missing_folders(folders: Iterable[str]) -> list[str]:
    """Return a message for each folder that cannot be read now; no file is opened."""
    found = []
    for folder in folders:
        path = Path(folder).expanduser()
        if not path.is_dir():
            problem = "is not a folder" if path.exists() else "does not exist"
            found.append(f"data_dir {folder!r} {problem}. Give a folder with CSV files.")
        elif not (path / META).is_file():
            found.append(
                f"data_dir {folder!r} has no file {META}, which lists the files: a line for each, "
                f"its name and its number of rows without the header. Write it."
            )
    return found


def find_files(folders: Sequence[str]) -> list[CsvFile]:
    """Return the files that `meta.dat` of each folder lists, in its order.

    Raises:
        ConfigError: If a folder or a file is missing, or the list is malformed or has a file twice.
    """
    if problems := missing_folders(folders):
        raise ConfigError(problems[0])
    listed = NamedFiles()
    found = [one for folder in folders for one in _listed(folder, listed)]
    if not any(one.num_rows for one in found):
        raise ConfigError(f"data_dir {list(folders)}: {META} lists no rows. Add data.")
    return found


def _listed(folder: str, listed: NamedFiles) -> list[CsvFile]:
    found = []
    for line in read_meta(folder, 1, "data_dir"):
        path = os.path.join(folder, line.names[0])
        listed.add([path], line.place)
        found.append(_file(path, line.num_rows, line.place))
    return found


def _file(path: str, num_rows: int, listed_in: str) -> CsvFile:
    try:
        status = os.stat(Path(path).expanduser())
    except OSError as error:
        raise ConfigError(
            f"{path}: {reason_of(error)}; {listed_in} lists this file. Restore it, or remove the "
            f"line."
        ) from error
    return CsvFile(path, status.st_size, status.st_mtime_ns, num_rows)


class CsvFiles:
    """The rows of files with a header, one file after the other.

    Args:
        files: The files, in this order.
        columns: Columns of a row, by which it is returned; empty = all, by their places.
        delimiter: Between the cells.
        advice: What to do if a column is missing.
        quotes: Whether cells may be quoted, and then have line ends inside.

    Cost:
        A file is scanned once in a process, when its first row is read: 16 bytes per row are kept.
    """

    def __init__(
        self,
        files: Sequence[CsvFile],
        columns: Sequence[str],
        *,
        delimiter: str = ",",
        advice: str = _AGAIN,
        quotes: bool = True,
    ) -> None:
        self.files = tuple(files)
        self.columns = tuple(columns)
        counts = np.array([one.num_rows for one in files], dtype=np.int64)
        self.num_rows = int(counts.sum())
        self._starts = np.cumsum(counts) - counts
        self._advice = advice
        self._quotes = quotes
        self._format: dict[str, Any] = {"delimiter": delimiter, "strict": quotes}
        if not quotes:
            self._format["quoting"] = csv.QUOTE_NONE

    @property
    def fingerprint(self) -> int:
        """A number that changes with the names, sizes or rows of the files."""
        digest = hashlib.sha256()
        for one in self.files:
            digest.update(repr((os.path.basename(one.path), one.size, one.num_rows)).encode())
        return int.from_bytes(digest.digest()[:_DIGEST_BYTES], "big")

    def check_unchanged(self) -> None:
        """Check that no file has been changed or removed.

        Raises:
            ConfigError: With the file, if one has.
        """
        for one in self.files:
            try:
                status = os.stat(Path(one.path).expanduser())
            except OSError as error:
                raise self._changed(one, f"cannot be read any more ({reason_of(error)})") from error
            self._check_unchanged(one, status)

    def _check_unchanged(self, file: CsvFile, status: os.stat_result) -> None:
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            raise self._changed(file, "has been changed")

    @staticmethod
    def _changed(file: CsvFile, what: str) -> ConfigError:
        return ConfigError(
            f"{file.path}: the file {what} since the dataloader was created. Restore it, or start "
            f"the run again."
        )

    def numbers_of(self, rows: Ints) -> Ints:
        """Return the number of the file of each row, from 0."""
        found: Ints = np.searchsorted(self._starts, rows, side="right") - 1
        return found

    def place_of(self, row: int) -> str:
        """Return the file and the number of a row, from 1, for messages."""
        number = int(self.numbers_of(np.array([row]))[0])
        return f"{self.files[number].path}: row {row - int(self._starts[number]) + 1}"

    def read(self, rows: Ints) -> list[list[str]]:
        """Return the cells of rows, in the order of `columns`.

        Raises:
            ConfigError: With the file and the row, if one cannot be read.
        """
        numbers = self.numbers_of(rows)
        found: list[list[str]] = [[] for _ in rows]
        for number in np.unique(numbers).tolist():
            file, (places,) = self.files[number], np.nonzero(numbers == number)
            index = self._index(file)
            wanted = self._wanted(file, index.columns)
            contents = self._contents(file, index.bounds[rows[places] - self._starts[number] + 1])
            for place, content in zip(places.tolist(), contents, strict=True):
                where = self.place_of(int(rows[place]))
                cells = self._cells(content, where)
                if len(cells) != len(index.columns):
                    raise ConfigError(
                        f"{where} has {len(cells)} cells, but the header has "
                        f"{len(index.columns)}. {_AGAIN}"
                    )
                found[place] = [cells[one] for one in wanted]
        return found

    def _contents(self, file: CsvFile, bounds: Ints) -> list[bytes]:
        """Return the rows of a file with these bounds, if it is the file that was indexed."""
        found = []
        try:
            with open(Path(file.path).expanduser(), "rb") as opened:
                self._check_unchanged(file, os.fstat(opened.fileno()))
                for begin, end in bounds.tolist():
                    opened.seek(begin)
                    found.append(opened.read(end - begin))
        except OSError as error:
            raise self._changed(file, f"cannot be read any more ({reason_of(error)})") from error
        return found

    def common_columns(self, names: Iterable[str]) -> list[str]:
        """Return which of these columns the files have; no more than the headers are read.

        Raises:
            ConfigError: If some files have a column, and others lack it.
        """
        files = [one for one in self.files if one.num_rows]
        headers = [self._header(one) for one in files]
        found = []
        for name in names:
            has = [name in columns for columns in headers]
            if any(has) and not all(has):
                raise ConfigError(
                    f"{files[has.index(True)].path} has the column {name}, but "
                    f"{files[has.index(False)].path} lacks it. Prepare both in the same way."
                )
            found += [name] * any(has)
        return found

    def _header(self, file: CsvFile) -> tuple[str, ...]:
        content = b""
        try:
            with open(Path(file.path).expanduser(), "rb") as opened:
                for line in opened:
                    content += line if content or line.strip() else b""
                    if content and not (self._quotes and content.count(b'"') % 2):
                        break
        except OSError as error:
            raise ConfigError(
                f"{file.path}: the file cannot be read: {reason_of(error)}."
            ) from error
        return self._names(content, file)

    def _names(self, header: bytes, file: CsvFile) -> tuple[str, ...]:
        """Return the names of the columns in a header."""
        content = header.removeprefix(b"\xef\xbb\xbf")
        cells = self._cells(content, f"{file.path}: the header") if content else []
        return tuple(one.strip() for one in cells)

    def _wanted(self, file: CsvFile, columns: tuple[str, ...]) -> list[int]:
        """Return the places of the columns in a file."""
        if not self.columns:
            return list(range(len(columns)))
        lacks = [name for name in self.columns if name not in columns]
        if lacks:
            raise ConfigError(
                f"{file.path}: the header has no column {', '.join(lacks)}; it has "
                f"{', '.join(columns)}. {self._advice}"
            )
        if twice := [name for name in self.columns if columns.count(name) > 1]:
            raise ConfigError(
                f"{file.path}: the header has the column {twice[0]} twice. Remove one of them."
            )
        return [columns.index(name) for name in self.columns]

    def _index(self, file: CsvFile) -> Index:
        """Return where the rows of a file are; there must be as many as the list says."""
        found = self.index_of(file)
        num_rows = max(0, len(found.bounds) - 1)
        if num_rows != file.num_rows:
            raise ConfigError(
                f"{file.path}: the file has {num_rows} rows after its header, but {META} says "
                f"{file.num_rows}. Correct {META}, or restore the file."
            )
        return found

    def index_of(self, file: CsvFile) -> Index:
        """Return where the rows of a file are; `num_rows` of the file is not compared.

        Raises:
            ConfigError: If it cannot be read, or has changed.
        """
        path = os.path.abspath(os.path.expanduser(file.path))
        key = (path, file.size, file.mtime_ns, self._quotes, self._format["delimiter"])
        found = _INDICES.get(key)
        if found is None:
            bounds = row_bounds(file.path, quotes=self._quotes)
            (header,) = self._contents(file, bounds[:1]) if len(bounds) else (b"",)
            found = _INDICES[key] = Index(bounds, self._names(header, file))
        return found

    def _cells(self, content: bytes, place: str) -> list[str]:
        try:
            records = list(csv.reader(io.StringIO(content.decode(), newline=""), **self._format))
        except (csv.Error, UnicodeError) as error:
            raise ConfigError(f"{place} cannot be read ({error}). {_AGAIN}") from error
        return records[0] if records else []


def whole_file(path: str, *, delimiter: str = ",", quotes: bool = True) -> CsvFile:
    """Return what is known of a file that no list names, with all its rows.

    Args:
        path: The file.
        delimiter: As of `CsvFiles`.
        quotes: Likewise.

    Raises:
        ConfigError: If it cannot be read.
    """
    try:
        status = os.stat(Path(path).expanduser())
    except OSError as error:
        raise ConfigError(f"{path}: the file cannot be read: {reason_of(error)}.") from error
    file = CsvFile(path, status.st_size, status.st_mtime_ns, 0)
    index = CsvFiles([file], (), delimiter=delimiter, quotes=quotes).index_of(file)
    return file._replace(num_rows=max(0, len(index.bounds) - 1))


def row_bounds(path: str, *, quotes: bool = True) -> Ints:
    """Return where the rows of a file begin and end, the header first; empty lines are left out.

    Args:
        path: The file.
        quotes: Whether a line end between quotes is part of a cell.

    Shapes:
        Returns: (rows, 2), int64.

    Raises:
        ConfigError: If the file cannot be read.
    """
    ends: list[Ints] = []
    num_quotes = position = 0
    try:
        with open(Path(path).expanduser(), "rb") as file:
            while content := file.read(_CHUNK):
                values = np.frombuffer(content, np.uint8)
                lines = np.flatnonzero(values == _NEWLINE)
                if quotes:
                    places = np.flatnonzero(values == _QUOTE)
                    before = num_quotes + np.searchsorted(places, lines)
                    lines = lines[before % 2 == 0]
                    num_quotes += len(places)
                ends.append(lines + position + 1)
                position += len(content)
    except OSError as error:
        raise ConfigError(f"{path}: the file cannot be read: {reason_of(error)}.") from error
    stops = np.concatenate([*ends, np.array([position])]) if position else np.zeros(1, np.int64)
    starts = np.concatenate([[0], stops[:-1]])
    bounds = np.stack([starts, stops], axis=1).astype(np.int64)
    shortest = np.where(bounds[:, 1] - bounds[:, 0] <= 2)[0]
    is_empty = np.zeros(len(bounds), bool)
    if len(shortest):
        is_empty[shortest] = [_is_blank(path, *bounds[one].tolist()) for one in shortest]
    return bounds[~is_empty]


def _is_blank(path: str, begin: int, end: int) -> bool:
    if begin == end:
        return True
    with open(Path(path).expanduser(), "rb") as file:
        file.seek(begin)
        return not file.read(end - begin).strip()
