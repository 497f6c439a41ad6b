"""Learning rate schedules that change by factors, at some or all steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.base.constraints import Milestones, NonNegativeFloat, Steps
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.functions import function_at
from modelzoo_trainer.optim.scheduler import LRScheduler, Scheduler, Tags, schedule_dataclass


@schedule_dataclass
class StepLR(LRScheduler):
    """Multiply the learning rate by gamma after every `step_size` steps."""

    optimizer: Optimizer | None
    initial_learning_rate: NonNegativeFloat
    step_size: Steps
    gamma: NonNegativeFloat
    param_group_tags: Tags = None

    @override
    def value(self, step: int) -> float:
        return float(self.initial_learning_rate * self.gamma ** (step // self.step_size))


@schedule_dataclass
class MultiStepLR(LRScheduler):
    """Multiply the learning rate by gamma at every milestone."""

    optimizer: Optimizer | None
    initial_learning_rate: NonNegativeFloat
    gamma: NonNegativeFloat
    milestones: Milestones
    param_group_tags: Tags = None

    @override
    def __post_init__(self) -> None:
        self.milestones = list(self.milestones)  # the caller may change its list
        super().__post_init__()

    @override
    def value(self, step: int) -> float:
        return float(self.initial_learning_rate * self.gamma ** bisect_right(self.milestones, step))


@schedule_dataclass
class PiecewiseConstantLR(LRScheduler):
    """Piecewise constant learning rates: one before the first milestone, one from each on."""

    optimizer: Optimizer | None
    learning_rates: list[NonNegativeFloat]
    milestones: Milestones
    param_group_tags: Tags = None

    @override
    def __post_init__(self) -> None:
        if len(self.learning_rates) != len(self.milestones) + 1:
            raise ConfigError(
                f"{self._name}.learning_rates has {len(self.learning_rates)} values, but "
                f"{len(self.milestones)} milestones need {len(self.milestones) + 1}."
            )
        self.learning_rates, self.milestones = list(self.learning_rates), list(self.milestones)
        super().__post_init__()

    @override
    def value(self, step: int) -> float:
        return self.learning_rates[bisect_right(self.milestones, step)]


@schedule_dataclass
class MultiplicativeLR(LRScheduler):
    """Multiplicative decay: initial * coefficient ** step."""

    optimizer: Optimizer | None
    initial_learning_rate: NonNegativeFloat
    coefficient: NonNegativeFloat
    param_group_tags: Tags = None

    @override
    def value(self, step: int) -> float:
        return float(self.initial_learning_rate * self.coefficient**step)


class OfFunction(Scheduler):
    """Base class of schedules that multiply their initial value by a function of the step."""

    def _take(self, argument: str, function: str | Callable[[int], float] | None) -> None:
        """Set the function; a subclass may define `factor` instead."""
        is_overridden = type(self).factor is not OfFunction.factor
        if (function is None) is not is_overridden:
            given = "two functions" if is_overridden else "no function"
            raise ConfigError(
                f"{self._name} requires exactly one function of the step, got {given}. Either "
                f"set {argument} to the dotted path of a function, or define factor(self, step) in "
                f"a subclass."
            )
        self._function = function_at(f"{self._name}.{argument}", function)

    def factor(self, step: int) -> float:
        """Return the factor on the initial value."""
        assert self._function is not None  # the constructor requires it
        return self._function(step)


@schedule_dataclass
class LambdaLR(OfFunction, LRScheduler):
    """The initial learning rate times a function of the step.

    Args:
        optimizer: Optimizer whose parameter groups are updated.
        initial_learning_rate: Learning rate that the function is multiplied by.
        lr_lambda: The function, `step -> factor`, or its dotted path; None if a subclass defines
            `factor`.
        param_group_tags: Update only groups with one of these tags.

    Raises:
        ConfigError: If there is no function, or there are two.
    """

    optimizer: Optimizer | None
    initial_learning_rate: NonNegativeFloat
    lr_lambda: str | Callable[[int], float] | None = None
    param_group_tags: Tags = None

    @override
    def __post_init__(self) -> None:
        self._take("lr_lambda", self.lr_lambda)
        super().__post_init__()

    @override
    def value(self, step: int) -> float:
        return float(self.initial_learning_rate * self.factor(step))
