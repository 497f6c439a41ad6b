"""Metrics in a CSV file with a column per metric."""

from __future__ import annotations

import csv
import io
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.base.regular_files import open_regular
from modelzoo_trainer.callback import Metrics
from modelzoo_trainer.loggers.file_logger import FileLogger, Line, LoadedCheckpoint, is_test

Row = dict[str, str]

STEP: Final = "step"
TIME: Final = "time"
_AS_TEXT: Final[Any] = {"encoding": "utf-8", "errors": "backslashreplace", "newline": ""}


class CsvTable:
    """A CSV file with a header row.

    Each row is one line. A new column rewrites the file atomically; earlier rows have an empty
    cell.

    `path`: the file; created with the first row.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []
        self._file: IO[str] | None = None
        self._num_rows: int | None = None
        self._last: Row = {}

    def append(self, rows: list[Row]) -> None:
        """Append rows, and add columns for new metrics."""
        self._inspect()
        columns = list(dict.fromkeys([*self._columns, STEP, TIME, *_names(rows)]))
        if columns != self._columns:
            self._rewrite(self._read(), columns)
        if self._file is None:
            self._file = self.path.open("a", **_AS_TEXT)
        self._file.write(_lines(self._columns, rows))
        self._file.flush()
        self._note(rows)

    def close(self) -> None:
        """Close the file, and clear the cache of its content."""
        file, self._file = self._file, None
        self._num_rows = None
        if file is not None:
            file.close()

    def end(self) -> dict[str, Any]:
        """Return the end of the table: the number of rows, and step and time of the last one."""
        self._inspect()
        return {"num_rows": self._num_rows, "last": _mark(self._last)}

    def cut(self, keep: Callable[[list[Row]], list[Row]]) -> None:
        """Remove rows.

        `keep`: returns the rows to keep, given all rows.
        """
        self._inspect()
        rows = self._read()
        kept = keep(rows)
        if len(kept) < len(rows):
            self._rewrite(kept, self._columns)
            self._num_rows, self._last = 0, {}
            self._note(kept)

    def _note(self, rows: list[Row]) -> None:
        self._num_rows = (self._num_rows or 0) + len(rows)
        self._last = rows[-1] if rows else self._last

    def _inspect(self) -> None:
        """Read the file, once; remove an incomplete last row."""
        if self._num_rows is not None:
            return
        self._columns, self._last = [], {}
        rows = []
        if self.path.is_file():
            _end_last_line(self.path)
            rows = self._read()
        self._note(rows)

    def _read(self) -> list[Row]:
        if not self.path.is_file():
            return []
        with io.TextIOWrapper(open_regular(self.path), encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            self._columns = next(reader, [])
            return [
                {name: cell for name, cell in zip(self._columns, cells, strict=False) if cell}
                for cells in reader
            ]

    def _rewrite(self, rows: list[Row], columns: list[str]) -> None:
        num_rows, last = self._num_rows, self._last
        self.close()
        self._num_rows, self._last, self._columns = num_rows, last, columns
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(f".{self.path.name}.new")
        fresh.unlink(missing_ok=True)
        with fresh.open("x", **_AS_TEXT) as file:
            file.write(_lines(columns, [dict(zip(columns, columns, strict=True)), *rows]))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)


def is_at(rows: list[Row], place: dict[str, Any]) -> bool:
    """Return whether rows continue a table that ended at `place`."""
    num = place.get("num_rows") or 0
    return num > 0 and len(rows) >= num and _mark(rows[num - 1]) == place.get("last")


def step_of(row: Row) -> float:
    """Return the step of a row; -1 if it has none."""
    try:
        return int(row[STEP])
    except (KeyError, ValueError):
        return -1


def _mark(row: Row) -> list[str]:
    return [row.get(STEP, ""), row.get(TIME, "")]


def _names(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _lines(columns: list[str], rows: Iterable[Row]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(
        [row.get(name, "") for name in columns] for row in rows
    )
    return text.getvalue()


def _end_last_line(path: Path) -> None:
    with path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


log = logging.getLogger("modelzoo_trainer.csv")

_LONGEST_TEXT: Final = (
    32_767  # maximum characters of a cell in spreadsheets; CSV readers accept 131072
)


class CSVLogger(FileLogger):
    """Append metrics to a CSV file, one row per log step.

    The first columns are `step` and `time`, in seconds since 1970; missing metrics have an empty
    cell, new ones get a column on the right. Numbers have all their digits; non-finite ones are
    nan, inf and -inf. Each row is one line: line breaks in strings are written as a backslash and
    an n. Strings are truncated to 32767 characters. Tensors of more than one element are dropped.
    Rows are written within about a second.

    A resumed run first truncates the table to its state at the checkpoint, but keeps results of
    `trainer.test`; from another table it removes the rows of steps that it will repeat. A run that
    starts at step 0 renames a table of
    an earlier run to `metrics-<time>.csv`.

    If the file cannot be written, a warning is logged once, and the run continues.

    Args:
        path: The file; None = `metrics.csv` in `model_dir`.

    State: The number of rows, and step and time of the last one.

    Raises:
        ConfigError: At set-up, if another logger writes the file, or it is a named pipe, a socket
            or, in `model_dir`, a device.

    Cost: A new column rewrites the file.
    """

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path, "metrics.csv", log)
        self._table: CsvTable | None = None

    def _table_at(self, path: Path) -> CsvTable:
        if self._table is None or self._table.path != path:
            self._table = CsvTable(path)
        return self._table

    @override
    def _write(self, path: Path, lines: list[Line]) -> None:
        table = self._table_at(path)
        self._is_own = self._is_own or not table.end()["num_rows"]
        table.append([to_row(*line) for line in lines])

    @override
    def _close(self) -> None:
        if self._table is not None:
            self._table.close()

    @override
    def _mark(self, path: Path) -> dict[str, Any]:
        try:
            return self._table_at(path).end()
        except (OSError, UnicodeError):
            return {"num_rows": None, "last": []}

    @override
    def _since(self, place: dict[str, Any]) -> Any:
        return place.get("num_rows")

    @override
    def _cut(self, path: Path, loaded: LoadedCheckpoint) -> None:
        def keep(rows: list[Row]) -> list[Row]:
            kept, tests = _kept(rows, loaded)
            self._kept_tests = [
                (int(row[STEP]), {name: row[name] for name in row if name not in (STEP, TIME)})
                for row in tests
            ]
            return kept

        self._table_at(path).cut(keep)


def _kept(rows: list[Row], loaded: LoadedCheckpoint) -> tuple[list[Row], list[Row]]:
    """Return the rows to keep, and which of them are results of tests after the checkpoint.

    Those at the checkpoint, and later ones that a resumed run does not repeat.
    """
    place = loaded.place
    if place is None or not is_at(rows, place):
        return [row for row in rows if step_of(row) <= loaded.step], []
    num = place["num_rows"]
    start = len(rows) if loaded.since is None else max(loaded.since, num)
    before = [] if loaded.repeats_tests else rows[num:start]
    tests = [row for row in before if is_test(row) and step_of(row) <= loaded.step]
    own = [row for row in rows[start:] if step_of(row) <= loaded.step]
    return rows[:num] + tests + own, tests


def to_row(metrics: Metrics, step: int, now: float) -> Row:
    """Convert metrics to the cells of a row.

    Metrics named "step" or "time" get an underscore; other types than numbers and strings are
    dropped.
    """
    cells = {STEP: str(step), TIME: repr(now)}
    for name, value in metrics.items():
        text = _cell(value)
        if text is None:
            log.debug("%s of type %s is not written.", name, type(value).__name__)
        else:
            cells[f"{name}_" if name in (STEP, TIME) else str(name)] = text
    return cells


def _cell(value: Any) -> str | None:
    if isinstance(value, str):
        return value.replace("\r", "\\r").replace("\n", "\\n")[:_LONGEST_TEXT]
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        is_one = (value.numel() if isinstance(value, Tensor) else value.size) == 1
        return repr(value.item()) if is_one else None
    if isinstance(value, (bool, int, float)):
        return repr(value)
    return None
