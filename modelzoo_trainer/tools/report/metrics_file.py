"""Read `metrics.jsonl`, or a JSON Lines file of another tool."""

from __future__ import annotations

import json
import math
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from modelzoo_trainer.base.regular_files import open_regular

Floats = NDArray[np.float64]

STEP_KEYS: Final = ("step", "global_step", "_step", "iteration", "iter")
TIME_KEYS: Final = ("time", "timestamp", "_timestamp", "wall_time")
MAX_METRICS: Final = 1000
MAX_TEXTS: Final = 100
_LONGEST_NAME: Final = 200
_LONGEST_LINE: Final = 1 << 26  # bytes; the rest is read as another line
_NON_FINITE: Final = {
    **dict.fromkeys(("nan", "NaN"), math.nan),
    **dict.fromkeys(("inf", "Infinity"), math.inf),
    **dict.fromkeys(("-inf", "-Infinity"), -math.inf),
}


@dataclass(frozen=True, slots=True)
class Series:
    """The values of one metric, by increasing step."""

    steps: Floats
    times: Floats
    """Seconds since 1970; NaN if missing."""
    values: Floats


@dataclass(frozen=True, slots=True)
class Text:
    """A metric that is a string."""

    name: str
    step: float
    text: str


@dataclass(slots=True)
class MetricsFile:
    """The content of a metrics file, with counts of unusable lines."""

    series: dict[str, Series] = field(default_factory=dict)
    texts: list[Text] = field(default_factory=list)
    """The newest ones."""
    num_lines: int = 0
    num_broken: int = 0
    """Lines that are not JSON objects or have no step, except a last one that is cut."""
    num_repeated: int = 0
    """Values that a later one of the same step replaces."""
    is_cut: bool = False
    """Whether the last line is not whole, as while it is being written."""
    left_out: set[str] = field(default_factory=set)
    """Metrics that are no numbers, such as tensors."""
    first_time: float = math.nan
    last_time: float = math.nan
    last_step: float = 0.0

    @property
    def is_unusable(self) -> bool:
        """Whether it has whole lines, but none is usable."""
        return 0 < self.num_broken == self.num_lines - self.is_cut


class _Column:
    """The values of a metric, in the order of the file."""

    __slots__ = ("steps", "times", "values")

    def __init__(self) -> None:
        self.steps, self.times, self.values = array("d"), array("d"), array("d")


def read_metrics(path: Path, *, inside: Path | None = None) -> MetricsFile:
    """Read a metrics file.

    Lines that are not JSON objects or have no step are counted and skipped.

    Args:
        path: The file.
        inside: A folder, which symbolic links must not lead out of; None = they may.

    Raises:
        OSError: If the file cannot be read.
    """
    found = MetricsFile()
    columns: dict[str, _Column] = {}
    texts: deque[Text] = deque(maxlen=MAX_TEXTS)
    with open_regular(path, inside=inside) as file:
        for line in iter(partial(file.readline, _LONGEST_LINE), b""):
            if line.isspace():
                continue
            found.num_lines += 1
            record = _parsed(line)
            step = None if record is None else _first(record, STEP_KEYS)
            if record is None or step is None:
                found.num_broken += 1
                found.is_cut = record is None and _is_cut(line)
                continue
            _add(record, step, found, columns, texts)
    if found.is_cut:
        found.num_broken -= 1
    found.texts = list(texts)
    for name, column in columns.items():
        found.series[name], repeated = _sorted(column)
        found.num_repeated += repeated
    return found


def _is_cut(line: bytes) -> bool:
    """Return whether a line is the beginning of an object."""
    return line.lstrip().startswith(b"{") and not line.endswith(b"\n")


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _first(record: Mapping[str, Any], keys: tuple[str, ...]) -> float | None:
    """Return the value of the first key that is a finite number or a date."""
    for key in keys:
        value = record.get(key)
        if isinstance(value, str):
            value = _seconds_of(value)
        number = _number(value)
        if number is not None and math.isfinite(number):
            return number
    return None


def _seconds_of(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None


def _add(
    record: dict[str, Any],
    step: float,
    found: MetricsFile,
    columns: dict[str, _Column],
    texts: deque[Text],
) -> None:
    """Add one line."""
    now = _first(record, TIME_KEYS)
    if now is None:
        now = math.nan
    elif math.isnan(found.first_time):
        found.first_time = found.last_time = now
    else:
        found.last_time = max(found.last_time, now)
    found.last_step = max(found.last_step, step)
    for key, value in record.items():
        name = key[:_LONGEST_NAME]
        number = _NON_FINITE.get(value) if type(value) is str else _number(value)
        if number is None:
            _add_other(name, value, step, found, texts)
        elif name not in STEP_KEYS and name not in TIME_KEYS:
            column = columns.get(name)
            if column is None:
                if len(columns) >= MAX_METRICS:
                    found.left_out.add(name)
                    continue
                column = columns[name] = _Column()
            column.steps.append(step)
            column.times.append(now)
            column.values.append(number)


def _add_other(name: str, value: Any, step: float, found: MetricsFile, texts: deque[Text]) -> None:
    if name in STEP_KEYS or name in TIME_KEYS or value is None:
        return
    if isinstance(value, str):
        texts.append(Text(name, step, value))
    elif not isinstance(value, bool) and len(found.left_out) < MAX_METRICS:
        found.left_out.add(name)


def _sorted(column: _Column) -> tuple[Series, int]:
    """Return a column by increasing step, and the number of replaced duplicates."""
    steps, times, values = (
        np.frombuffer(part, dtype=np.float64)
        for part in (column.steps, column.times, column.values)
    )
    repeated = 0
    if len(steps) > 1 and not bool(np.all(steps[1:] > steps[:-1])):
        order = np.argsort(steps, kind="stable")
        is_last = np.append(steps[order][1:] != steps[order][:-1], True)
        repeated = int(len(order) - is_last.sum())
        steps, times, values = (part[order][is_last] for part in (steps, times, values))
    return Series(steps, times, values), repeated
