"""Lengths of time in the units of Composer, in steps."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Final

_TIME: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+) *([a-z]+)")
UNITS: Final = {
    "ep": "epochs",
    "ba": "batches (steps)",
    "tok": "tokens",
    "sp": "samples",
    "dur": "fractions of the run",
    "sec": "seconds",
}


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of time, such as 2 epochs."""

    value: float
    unit: str  # a key of UNITS

    def __str__(self) -> str:
        return f"{self.value:g}{self.unit}"


def tidy(number: float) -> float:
    """Return a computed number without the noise of its last digits."""
    return float(f"{number:.12g}")


def read_duration(value: Any) -> Duration | None:
    """Return a length of time; a number without a unit means epochs. None if it is invalid."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return Duration(float(value), "ep")
    found = (
        _TIME.fullmatch(value.strip().lower().replace("_", "")) if isinstance(value, str) else None
    )
    if not found or found[2] not in UNITS:
        return None
    return Duration(float(found[1]), found[2])


@dataclass(frozen=True, slots=True)
class RunLengths:
    """What lengths of time depend on.

    Attributes:
        length: Of the whole run.
        batch_size: Samples per step, of all processes; None = unknown.
        steps_per_epoch: None = unknown.
        tokens_per_sample: None = not the same for all samples.
    """

    length: Duration
    batch_size: int | None
    steps_per_epoch: int | None
    tokens_per_sample: int | None

    @property
    def total(self) -> int | None:
        """Steps of the run; None = unknown."""
        return self.steps(self.length) if self.length.unit != "dur" else None

    def steps(self, time: Duration, *, up: bool = True) -> int | None:
        """Return a length in steps; None = unknown.

        `up`: Round up, as a run does that ends when a length is reached; else down, as schedules
        do.
        """
        exact = self._exact_steps(time)
        return None if exact is None else (math.ceil if up else math.floor)(round(exact, 6))

    def _exact_steps(self, time: Duration) -> float | None:
        match time.unit:
            case "ba":
                return time.value
            case "ep":
                return self.steps_per_epoch and time.value * self.steps_per_epoch
            case "sp":
                return self.batch_size and time.value / self.batch_size
            case "tok":
                tokens = (self.batch_size or 0) * (self.tokens_per_sample or 0)
                return time.value / tokens if tokens else None
            case "dur":
                total = self.total
                return None if total is None else time.value * total
        return None  # seconds

    def why_unknown(self, time: Duration) -> str:
        """Return what is missing to know a length in steps."""
        unit = self.length.unit if time.unit == "dur" else time.unit
        if unit == "ep":
            return (
                f"{time} depends on the number of steps of an epoch, which is not in the file. "
                f"Convert again with --steps-per-epoch N (samples / global batch size)."
            )
        if unit == "tok":
            return (
                f"{time} counts tokens, but samples have different numbers of tokens. Write the "
                f"length in batches (ba) in the file, and convert again."
            )
        return f"{time} cannot be expressed in steps. Write it in batches (ba)."
