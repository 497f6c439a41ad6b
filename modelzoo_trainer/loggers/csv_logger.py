"""Metrics in a table: a text file with a column for each metric."""

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

from modelzoo_trainer.callback import Metrics
from modelzoo_trainer.loggers.file_logger import FileLogger, Line, Loaded

Row = dict[str, str]

STEP: Final = "step"
TIME: Final = "time"
_AS_TEXT: Final[Any] = {"encoding": "utf-8", "errors": "backslashreplace", "newline": ""}


class CsvTable:
    """Rows of a file that begins with the names of its columns.

    Each row is one line. A new column gets the file written anew, at once or not at all; its cells
    are empty in the rows before.

    `path`: the file; made when the first row comes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []
        self._file: IO[str] | None = None
        self._num_rows: int | None = None
        self._last: Row = {}

    def append(self, rows: list[Row]) -> None:
        """Add rows, and columns for what is new in them."""
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
        """Close the file, and forget what is known of it."""
        file, self._file = self._file, None
        self._num_rows = None
        if file is not None:
            file.close()

    def end(self) -> dict[str, Any]:
        """Return where the table ends: the number of rows, and step and time of the last one."""
        self._inspect()
        return {"num_rows": self._num_rows, "last": _mark(self._last)}

    def cut(self, keep: Callable[[list[Row]], list[Row]]) -> None:
        """Keep some of the rows.

        `keep`: given all rows, returns those that stay.
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
        """Learn what is in the file, once; remove a last row that a crash cut off."""
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
        with self.path.open(encoding="utf-8", newline="") as file:
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
    """Return whether rows are those of a table that once ended at a place, and perhaps more."""
    num = place.get("num_rows") or 0
    return num > 0 and len(rows) >= num and _mark(rows[num - 1]) == place.get("last")


def step_of(row: Row) -> float:
    """Return the step of a row; of one that has none, one before all others."""
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

_LONGEST_TEXT: Final = 32_767  # characters of a cell that spreadsheets take; readers take 131072


class CSVLogger(FileLogger):
    """Appends metrics to a table of comma-separated values, a row for each delivery.

    The first columns are `step` and `time`, in seconds since 1970; a metric that was not delivered
    has an empty cell. A metric that comes up later gets a column on the right. Numbers have all
    their digits; those that are not finite are nan, inf and -inf. Each row is one line: an end
    of line in a text is a backslash and an n. Texts end after 32767 characters. Tensors of more
    than one element are dropped. Rows reach the file at most about a second later.

    A run that resumes first cuts the table back to where it was when the checkpoint was made; of
    another table it removes the rows of the steps that it will take again. A run that begins at
    step 0 gives a table with rows of others another name, `metrics-<time>.csv`.

    A file that cannot be written is logged once, and the run continues without it.

    Args:
        path: The file; None = `metrics.csv` in `model_dir`.

    State: The number of rows, with step and time of the last one.

    Raises:
        ConfigError: At set-up, if another logger writes that file, or it is a named pipe, a socket
            or, in `model_dir`, a device.

    Cost: With a new column the file is written anew.
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
    def _cut(self, path: Path, loaded: Loaded) -> None:
        self._table_at(path).cut(lambda rows: _kept(rows, loaded))


def _kept(rows: list[Row], loaded: Loaded) -> list[Row]:
    """Return the rows of a checkpoint, and those of validations since it was loaded."""
    place = loaded.place
    if place is None or not is_at(rows, place):
        return [row for row in rows if step_of(row) <= loaded.step]
    num = place["num_rows"]
    own = [] if loaded.since is None else rows[max(loaded.since, num) :]
    return rows[:num] + [row for row in own if step_of(row) <= loaded.step]


def to_row(metrics: Metrics, step: int, now: float) -> Row:
    """Return metrics as the cells of a row.

    Metrics called "step" or "time" get an underscore; what has no place in a cell is left out.
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
