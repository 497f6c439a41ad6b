"""Functions of the step for fractions: of zero weights, or of weights that an update drops."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Final

from annotated_types import MinLen
from typing_extensions import override

from modelzoo_trainer.base.constraints import (
    FiniteFloat,
    Fraction,
    NonNegativeInt,
    PositiveInt,
    checked,
)
from modelzoo_trainer.errors import ConfigError, suggest

_MOST: Final = 300.0  # maximum exponent: far outside [0, 1] for any curve


class Curve(ABC):
    """A number for each step; it is clamped to [0, 1] when it is used."""

    @abstractmethod
    def value(self, step: int, index: int = 0) -> float:
        """Return the number.

        Args:
            step: The `global_step`.
            index: Number of updates up to and including this step.
        """


class Constant(Curve):
    """A constant.

    Args:
        value: The number.
    """

    @checked()
    def __init__(self, value: FiniteFloat) -> None:
        self._value = float(value)

    @override
    def value(self, step: int, index: int = 0) -> float:
        return self._value


class Linear(Curve):
    """A linear function of the step.

    Args:
        init: Value at step 0.
        slope: Increase per step.
    """

    @checked()
    def __init__(self, init: FiniteFloat, slope: FiniteFloat) -> None:
        self._init = float(init)
        self._slope = float(slope)

    @override
    def value(self, step: int, index: int = 0) -> float:
        return self._init + self._slope * step


class Exp(Curve):
    r"""Exponential approach to a final value: $f + (i - f) e^{-\gamma t}$.

    Args:
        init: Value at step 0.
        gamma: Rate per step.
        final: Limit.
    """

    @checked()
    def __init__(self, init: FiniteFloat, gamma: FiniteFloat, final: FiniteFloat = 1.0) -> None:
        self._init = float(init)
        self._gamma = float(gamma)
        self._final = float(final)

    @override
    def value(self, step: int, index: int = 0) -> float:
        factor = math.exp(min(-self._gamma * step, _MOST))
        return self._final + (self._init - self._final) * factor


class Power(Curve):
    r"""Geometric approach to a final value: $f + (i - f) \beta^t$.

    Args:
        init: Value at step 0.
        beta: Factor per step.
        final: Limit.
    """

    @checked()
    def __init__(self, init: FiniteFloat, beta: FiniteFloat, final: FiniteFloat = 1.0) -> None:
        self._init = float(init)
        self._beta = float(beta)
        self._final = float(final)

    @override
    def value(self, step: int, index: int = 0) -> float:
        return self._final + (self._init - self._final) * _power(self._beta, step)


class Cosine(Curve):
    """A cosine wave between two values.

    Args:
        init: Value at step 0.
        half_period: Steps until `minimum` is reached, > 0.
        minimum: The other value.
    """

    @checked()
    def __init__(
        self, init: FiniteFloat, half_period: PositiveInt, minimum: FiniteFloat = 0.0
    ) -> None:
        self._init = float(init)
        self._half_period = half_period
        self._minimum = float(minimum)

    @override
    def value(self, step: int, index: int = 0) -> float:
        half = (self._init - self._minimum) / 2
        return self._minimum + half * (1 + math.cos(math.pi * step / self._half_period))


class Cycling(Curve):
    """Cycle through a list of values.

    Args:
        values: At least one.
        period: Steps per value, > 0; None = one update per value.
    """

    @checked()
    def __init__(
        self, values: Annotated[list[FiniteFloat], MinLen(1)], period: PositiveInt | None = None
    ) -> None:
        self._values = [float(value) for value in values]
        self._period = period

    @override
    def value(self, step: int, index: int = 0) -> float:
        place = index if self._period is None else step // self._period
        return self._values[place % len(self._values)]


class Cubic(Curve):
    r"""Cubic approach to a final value, fast first: $f + (i - f) (1 - (t - t_0) / n)^3$.

    The pruning schedule of Zhu and Gupta: To prune, or not to prune: exploring the efficacy of
    pruning for model compression, 2017.

    Args:
        final: Value from step `start + steps` on.
        steps: Length, > 0.
        init: Value up to `start`.
        start: Step at which it begins, >= 0.
    """

    @checked()
    def __init__(
        self,
        final: FiniteFloat,
        steps: PositiveInt,
        init: FiniteFloat = 0.0,
        start: NonNegativeInt = 0,
    ) -> None:
        self._final = float(final)
        self._steps = steps
        self._init = float(init)
        self._start = start

    @override
    def value(self, step: int, index: int = 0) -> float:
        left = 1 - min(max(step - self._start, 0), self._steps) / self._steps
        return self._final + (self._init - self._final) * left**3


CURVES: Final[dict[str, type[Curve]]] = {
    "constant": Constant,
    "linear": Linear,
    "exp": Exp,
    "power": Power,
    "cosine": Cosine,
    "cycling": Cycling,
    "cubic": Cubic,
}


Schedule = Fraction | Annotated[dict[str, Any], "a mapping with type"] | Curve
"""A constant; a mapping with a key of `CURVES` as `type` and its arguments; or a curve."""


def as_curve(given: Schedule, where: str) -> Curve:
    """Return a curve.

    Raises:
        ConfigError: If a mapping does not describe one.
    """
    if isinstance(given, Curve):
        return given
    if isinstance(given, Mapping):
        arguments = {key: value for key, value in given.items() if key != "type"}
        kind = given.get("type")
        if not isinstance(kind, str) or kind.lower() not in CURVES:
            known = suggest(kind if isinstance(kind, str) else "", CURVES)
            problem = f"is {kind!r}" if "type" in given else "is missing"
            raise ConfigError(f"{where}.type {problem}. {known}")
        made: Curve = make(CURVES[kind.lower()], arguments, where)
        return made
    return Constant(given)


def make(target: Any, arguments: Mapping[str, Any], where: str) -> Any:
    """Create an object of a class from a mapping of arguments.

    Raises:
        ConfigError: If a name is unknown or missing, or the class rejects a value.
    """
    taken = inspect.signature(target).parameters
    for name in arguments:
        if name not in taken:
            raise ConfigError(
                f"{where}.{name}: no such argument of {target.__name__}. {suggest(name, taken)}"
            )
    for name, parameter in taken.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise ConfigError(f"{where}.{name} is missing; {target.__name__} requires it.")
    return target(**arguments)


def _power(base: float, exponent: int) -> float:
    """Return a power, limited to a large number instead of overflowing."""
    try:
        return float(base**exponent)
    except OverflowError:
        size = math.exp(_MOST)
        return -size if base < 0 and exponent % 2 else size
