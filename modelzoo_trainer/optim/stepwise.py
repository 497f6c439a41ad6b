"""Learning rates that change by factors, at some steps or at each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.constraints import Milestones, NonNegativeFloat, Steps, checked
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.functions import function_at
from modelzoo_trainer.optim.scheduler import LRScheduler, Tags


class StepLR(LRScheduler):
    """The initial learning rate, multiplied by gamma after every `step_size` steps."""

    @checked()
    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: NonNegativeFloat,
        step_size: Steps,
        gamma: NonNegativeFloat,
        param_group_tags: Tags = None,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        return float(self.initial_learning_rate * self.gamma ** (step // self.step_size))


class MultiStepLR(LRScheduler):
    """The initial learning rate, multiplied by gamma at every milestone."""

    @checked()
    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: NonNegativeFloat,
        gamma: NonNegativeFloat,
        milestones: Milestones,
        param_group_tags: Tags = None,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.gamma = gamma
        self.milestones = list(milestones)
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        return float(self.initial_learning_rate * self.gamma ** bisect_right(self.milestones, step))


class PiecewiseConstantLR(LRScheduler):
    """One learning rate before the first milestone, and one from each milestone on."""

    @checked()
    def __init__(
        self,
        optimizer: Optimizer | None,
        learning_rates: list[NonNegativeFloat],
        milestones: Milestones,
        param_group_tags: Tags = None,
    ) -> None:
        if len(learning_rates) != len(milestones) + 1:
            raise ConfigError(
                f"PiecewiseConstantLR.learning_rates has {len(learning_rates)} values for "
                f"{len(milestones)} milestones; it must have one more than there are milestones."
            )
        self.learning_rates = list(learning_rates)
        self.milestones = list(milestones)
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        return self.learning_rates[bisect_right(self.milestones, step)]


class MultiplicativeLR(LRScheduler):
    """initial * coefficient ** step."""

    @checked()
    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: NonNegativeFloat,
        coefficient: NonNegativeFloat,
        param_group_tags: Tags = None,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.coefficient = coefficient
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        return float(self.initial_learning_rate * self.coefficient**step)


class LambdaLR(LRScheduler):
    """The initial learning rate times a function of the step.

    Args:
        optimizer: Whose groups are written.
        initial_learning_rate: What the function is multiplied by.
        lr_lambda: The function, `step -> factor`, or its dotted path, which is imported; None if
            a subclass defines `factor`.
        param_group_tags: Only groups with one of these tags.

    Raises:
        ConfigError: If there is no function, or two.
    """

    @checked()
    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: NonNegativeFloat,
        lr_lambda: str | Callable[[int], float] | None = None,
        param_group_tags: Tags = None,
    ) -> None:
        is_overridden = type(self).factor is not LambdaLR.factor
        if (lr_lambda is None) is not is_overridden:
            given = "two functions" if is_overridden else "no function"
            raise ConfigError(
                f"{self._name} has {given} of the step. Set lr_lambda to the dotted path of one, "
                f"or define factor(self, step) in a subclass."
            )
        self.initial_learning_rate = initial_learning_rate
        self._function = function_at(f"{self._name}.lr_lambda", lr_lambda)
        super().__init__(optimizer, param_group_tags)

    def factor(self, step: int) -> float:
        """Return by what the initial learning rate is multiplied.

        Args:
            step: Number of optimizer steps taken.
        """
        assert self._function is not None  # the constructor demands it
        return self._function(step)

    @override
    def value(self, step: int) -> float:
        return float(self.initial_learning_rate * self.factor(step))
