"""Metrics in a table: a text file with a column for each metric."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.callback import Metrics
from modelzoo_trainer.loggers.csv_table import STEP, TIME, CsvTable, Row, is_at, step_of
from modelzoo_trainer.loggers.file_logger import FileLogger, Line, Loaded

log = logging.getLogger("modelzoo_trainer.csv")

_LONGEST_TEXT: Final = 32_767  # characters of a cell that spreadsheets take; readers take 131072


class CSVLogger(FileLogger):
    """Appends metrics to a table of comma-separated values, a row for each delivery.

    The first columns are `step` and `time`, in seconds since 1970; a metric that was not delivered
    has an empty cell. A metric that comes up later gets a column on the right. Numbers have all
    their digits; those that are not finite are nan, inf and -inf. Each row is one line: an end
    of line in a text is a backslash and an n. Texts end after 32767 characters. Tensors of more
    than one element are left out. Rows reach the file at most about a second later.

    A run that resumes first cuts the table back to where it was when the checkpoint was made; of
    another table it removes the rows of the steps that it will take again. A run that begins at
    step 0 gives a table with rows of others another name, `metrics-<time>.csv`.

    A file that cannot be written is logged once, and the run goes on without it.

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
