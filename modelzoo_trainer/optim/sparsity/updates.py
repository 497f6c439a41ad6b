"""Steps at which masks change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from typing import Annotated, Any

from annotated_types import MinLen
from typing_extensions import override

from modelzoo_trainer.base.constraints import NonNegativeInt, PositiveInt, checked
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.sparsity.curves import make


class Updates(ABC):
    """The steps of updates; a step is the `global_step` at its beginning."""

    @abstractmethod
    def last(self, step: int) -> tuple[int, int]:
        """Return the step and the number, counted from 1, of the last update up to `step`.

        Args:
            step: May be the step of an update itself.

        Returns:
            (0, 0) if there was none: masks are the initial ones.
        """

    def is_due(self, step: int) -> bool:
        """Return whether there is an update at a step."""
        at, number = self.last(step)
        return number > 0 and at == step


class UpdateEvery(Updates):
    """Periodic updates.

    Args:
        freq: Steps between two updates, > 0.
        start: Step of the first update, >= 0; None = `freq`.
        stop: Step from which on there are no updates, after the first one; None = no end.
    """

    @checked("update")
    def __init__(
        self,
        freq: PositiveInt,
        start: NonNegativeInt | None = None,
        stop: NonNegativeInt | None = None,
    ) -> None:
        self._freq = freq
        self._start = freq if start is None else start
        if stop is not None and stop <= self._start:
            raise ConfigError(
                f"update.stop is {stop}, but the first update is at step {self._start}, so there "
                f"would be no update. Increase update.stop, or decrease update.start."
            )
        self._num_most = None if stop is None else -(-(stop - self._start) // freq)

    @override
    def last(self, step: int) -> tuple[int, int]:
        number = max(0, (step - self._start) // self._freq + 1)
        if self._num_most is not None:
            number = min(number, self._num_most)
        return (self._start + (number - 1) * self._freq, number) if number else (0, 0)


class UpdateAt(Updates):
    """Updates at given steps.

    Args:
        steps: Each >= 0, in any order.
    """

    @checked("update")
    def __init__(self, steps: Annotated[list[NonNegativeInt], MinLen(1)]) -> None:
        self._steps = sorted(set(steps))

    @override
    def last(self, step: int) -> tuple[int, int]:
        number = bisect_right(self._steps, step)
        return (self._steps[number - 1], number) if number else (0, 0)


UpdateSteps = Annotated[dict[str, Any], "a mapping with freq or steps"] | Updates
"""Arguments of `UpdateEvery` or `UpdateAt`, or an instance."""


def as_updates(given: UpdateSteps, where: str) -> Updates:
    """Return the steps of updates.

    Raises:
        ConfigError: If a mapping does not describe them.
    """
    if isinstance(given, Updates):
        return given
    form = UpdateEvery if given.get("steps") is None else UpdateAt
    arguments = {key: value for key, value in given.items() if value is not None}
    made: Updates = make(form, arguments, where)
    return made
