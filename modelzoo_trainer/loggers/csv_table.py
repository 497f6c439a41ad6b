"""A table in a text file that gains rows and columns, and is cut back when a run goes back."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, Final

Row = dict[str, str]

STEP: Final = "step"
TIME: Final = "time"
_AS_TEXT: Final[Any] = {"encoding": "utf-8", "errors": "backslashreplace", "newline": ""}


class CsvTable:
    """Rows of a file that begins with the names of its columns.

    Each row is one line. A new column gets the file written anew, at once or not at all; its cells
    are empty in the rows before.

    Args:
        path: The file; made when the first row comes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []
        self._file: IO[str] | None = None
        self._num_rows: int | None = None
        self._last: Row = {}

    def append(self, rows: list[Row]) -> None:
        """Add rows, and columns for what is new in them."""
        self._settle()
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
        self._settle()
        return {"num_rows": self._num_rows, "last": _mark(self._last)}

    def cut(self, keep: Callable[[list[Row]], list[Row]]) -> None:
        """Keep some of the rows.

        Args:
            keep: Given all rows, returns those that stay.
        """
        self._settle()
        rows = self._read()
        kept = keep(rows)
        if len(kept) < len(rows):
            self._rewrite(kept, self._columns)
            self._num_rows, self._last = 0, {}
            self._note(kept)

    def _note(self, rows: list[Row]) -> None:
        self._num_rows = (self._num_rows or 0) + len(rows)
        self._last = rows[-1] if rows else self._last

    def _settle(self) -> None:
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
