"""Selection of one metric by its name, with a warning if it is never logged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, Final

from modelzoo_trainer.base.constraints import Name
from modelzoo_trainer.base.metric_direction import Direction, direction_of
from modelzoo_trainer.errors import ConfigError, suggest

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.metrics")

MetricName = Annotated[Name, "the name of a metric, such as 'validate_0/loss'"]


class MetricWatch:
    """Pick a metric by its name; remember the names of others until it is logged."""

    def __init__(self, owner: str, metric: str) -> None:
        self._owner: Final = owner
        self.metric: Final = metric
        self._others: set[str] | None = set()
        self._unlogged: Mapping[str, str] = {}
        self._has_warned = self._has_validated = False
        self._is_guess = False

    def mode_or_default(self, mode: Direction | None) -> Direction:
        """Return a direction as given, or by the metric's name, or "min"."""
        named = mode or direction_of(self.metric)
        self._is_guess = named is None
        return named or "min"

    def begin(self, unlogged: Mapping[str, str]) -> None:
        """Reset at the beginning of a fit.

        Args:
            unlogged: Metrics that the model returns but that are not logged, and why; it may be
                filled later.
        """
        self._others = set()
        self._unlogged = unlogged
        self._has_warned = self._has_validated = False

    def note_validation(self, trainer: Trainer) -> None:
        """Record the end of a validation."""
        self._has_validated = self._has_validated or trainer.val_is_complete

    def had_time(self, trainer: Trainer) -> bool:
        """Return whether a valid metric would have been logged in this fit."""
        return self._has_validated or not trainer.early_exit.should_exit

    def value_in(self, metrics: Mapping[str, Any]) -> float | None:
        """Return the metric's value, or None if it is not among these.

        Raises:
            ConfigError: If it is not a number.
        """
        if self.metric not in metrics:
            if self._others is not None:
                self._others.update(metrics)
            return None
        self._others = None
        if self._is_guess:
            self._is_guess = False
            log.info(
                "%s: lower values of %s are taken as better; set mode='max' if higher ones are.",
                self._owner,
                self.metric,
            )
        value = metrics[self.metric]
        if not isinstance(value, Real):
            raise ConfigError(
                f"{self._owner}.metric: {self.metric!r} is a {type(value).__name__}, which cannot "
                f"be ranked. Name a metric that is a number."
            )
        return float(value)

    @property
    def hint(self) -> str:
        """Why the metric is not logged, or a suggestion for its name.

        "" if it was logged, or no other was.
        """
        if not self._others:
            return ""
        if self.metric in self._unlogged:
            return self._unlogged[self.metric]
        last = self.metric.rpartition("/")[2]
        same = sorted(name for name in self._others if name.rpartition("/")[2] == last)
        return f"Did you mean {same[0]!r}?" if same else suggest(self.metric, self._others)

    @property
    def is_missing(self) -> bool:
        """Whether the metric has not been logged in this fit."""
        return self._others is not None

    @property
    def advice(self) -> str:
        """All names that were logged, and why the metric is not, or the nearest name."""
        is_known = self.hint.startswith("Did") or self.metric in self._unlogged
        near = self.hint if is_known else ""
        return f"{near} Logged: {', '.join(sorted(self._others or ())) or 'nothing'}.".strip()

    def warn_if_missing(self) -> None:
        """Warn once if others were logged but not this metric, and why, or the nearest name."""
        if self.hint and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: no metric %r was logged so far. %s", self._owner, self.metric, self.hint
            )
