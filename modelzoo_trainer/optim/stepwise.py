"""Learning rates that change by factors, at some steps or at each."""

from __future__ import annotations

from bisect import bisect_right

from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.checks import check_milestones, check_positive
from modelzoo_trainer.optim.scheduler import LRScheduler, Tags


class StepLR(LRScheduler):
    """The initial learning rate, multiplied by gamma after every `step_size` steps."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: float,
        step_size: int,
        gamma: float,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive(self, step_size=step_size)
        self.initial_learning_rate = initial_learning_rate
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        return float(self.initial_learning_rate * self.gamma ** (step // self.step_size))


class MultiStepLR(LRScheduler):
    """The initial learning rate, multiplied by gamma at every milestone."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: float,
        gamma: float,
        milestones: list[int],
        param_group_tags: Tags = None,
    ) -> None:
        check_milestones(self, milestones)
        self.initial_learning_rate = initial_learning_rate
        self.gamma = gamma
        self.milestones = list(milestones)
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        return float(self.initial_learning_rate * self.gamma ** bisect_right(self.milestones, step))


class PiecewiseConstantLR(LRScheduler):
    """One learning rate before the first milestone, and one from each milestone on."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        learning_rates: list[float],
        milestones: list[int],
        param_group_tags: Tags = None,
    ) -> None:
        check_milestones(self, milestones)
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

    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: float,
        coefficient: float,
        param_group_tags: Tags = None,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.coefficient = coefficient
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        return float(self.initial_learning_rate * self.coefficient**step)


class LambdaLR(LRScheduler):
    """The initial learning rate times a function of the step, which a subclass supplies."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: float,
        param_group_tags: Tags = None,
    ) -> None:
        if type(self).factor is LambdaLR.factor:
            raise ConfigError(
                f"{self._name} has no function of the step. Subclass LambdaLR, define "
                f"factor(self, step), and name the subclass."
            )
        self.initial_learning_rate = initial_learning_rate
        super().__init__(optimizer, param_group_tags)

    def factor(self, step: int) -> float:
        """Return by what the initial learning rate is multiplied.

        Args:
            step: Number of optimizer steps taken.
        """
        raise NotImplementedError

    @override
    def value(self, step: int) -> float:
        return self.initial_learning_rate * self.factor(step)
