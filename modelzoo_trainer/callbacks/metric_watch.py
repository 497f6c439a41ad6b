"""One metric out of all that are logged, and what is said if it never comes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from numbers import Real
from typing import Annotated, Any, Final

from modelzoo_trainer.constraints import Name
from modelzoo_trainer.errors import ConfigError, suggest

log = logging.getLogger("modelzoo_trainer.metrics")

MetricName = Annotated[Name, "the name of a metric, such as 'validate_0/loss'"]


class MetricWatch:
    """Picks a metric by its name; remembers the others' names until it has come."""

    def __init__(self, owner: str, metric: str) -> None:
        self._owner: Final = owner
        self.metric: Final = metric
        self._others: set[str] | None = set()
        self._has_warned = False

    def begin(self) -> None:
        """Forget what has come: a fit begins."""
        self._others = set()
        self._has_warned = False

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
        value = metrics[self.metric]
        if not isinstance(value, Real):
            raise ConfigError(
                f"{self._owner}.metric: {self.metric!r} is a {type(value).__name__}, which cannot "
                f"be best. Name a metric that is a number."
            )
        return float(value)

    @property
    def hint(self) -> str:
        """What helps with the name; "" if the metric has come, or none has."""
        return suggest(self.metric, self._others) if self._others else ""

    @property
    def is_missing(self) -> bool:
        """Whether the metric has not come in this fit."""
        return self._others is not None

    @property
    def advice(self) -> str:
        """All names that have come, and the nearest one."""
        near = self.hint if self.hint.startswith("Did") else ""
        return f"{near} Logged: {', '.join(sorted(self._others or ())) or 'nothing'}.".strip()

    def warn_if_missing(self) -> None:
        """Say once that the metric has not come though others have: its name may be misspelt."""
        if self.hint and not self._has_warned:
            self._has_warned = True
            log.warning("%s: no metric %r so far. %s", self._owner, self.metric, self.hint)
