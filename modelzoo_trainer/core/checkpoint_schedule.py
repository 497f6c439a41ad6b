"""When a checkpoint is due."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from modelzoo_trainer.core.early_exit import SAVE
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class Times:
    """The step boundaries at which a checkpoint is due: by steps, by the clock, by passes.

    Args:
        steps: Every so many steps; None or 0 = none.
        minutes: So many minutes after the last one, > 0; None = none.
        epochs: At the end of every so many passes over the data, > 0; None = none.

    Raises:
        ConfigError: If a number is out of range.
    """

    def __init__(
        self, steps: int | None = None, minutes: float | None = None, epochs: int | None = None
    ) -> None:
        if steps is not None and not _is_count(steps):
            raise ConfigError(
                f"checkpoint.steps is {steps!r}; it must be a whole number or None (null)."
            )
        if epochs is not None and not (_is_count(epochs) and epochs):
            raise ConfigError(
                f"checkpoint.epochs is {epochs!r}; it must be a whole number > 0, or None (null)."
            )
        is_number = isinstance(minutes, (int, float)) and not isinstance(minutes, bool)
        if minutes is not None and not (is_number and 0 < minutes < math.inf):
            raise ConfigError(
                f"checkpoint.minutes is {minutes!r}; it must be a number > 0, or None (null)."
            )
        self.steps = steps or None
        self.epochs = epochs
        self.minutes = minutes
        self._interval_s = None if minutes is None else 60.0 * minutes
        self._next_s = 0.0
        self._is_asked = False

    @property
    def is_any(self) -> bool:
        """Whether checkpoints are due at all."""
        return not self.steps is self.epochs is self._interval_s is None

    def start(self) -> None:
        """Count the minutes from now."""
        self._is_asked = False
        if self._interval_s is not None:
            self._next_s = time.monotonic() + self._interval_s

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether a checkpoint is due at the step boundary at hand."""
        if self.steps is not None and trainer.global_step % self.steps == 0:
            return True
        if self._interval_s is not None and self._time_is_up(trainer):
            return True
        data = trainer.data
        return self.epochs is not None and data.is_last and (data.epoch + 1) % self.epochs == 0

    def ask(self) -> None:
        """Have a checkpoint due at the next step boundary."""
        self._is_asked = True

    def _time_is_up(self, trainer: Trainer) -> bool:
        """Return whether the minutes are over; of several processes the first one's clock says."""
        backend = trainer.backend
        if backend.world_size == 1:
            return time.monotonic() >= self._next_s
        if backend.is_main and time.monotonic() >= self._next_s:
            self._next_s = math.inf  # until it has been heard
            backend.propose(SAVE)
        asked, self._is_asked = self._is_asked, False
        return asked


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
