"""Schedules of weight decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import cycles, decay, stepwise
from modelzoo_trainer.optim.checks import check_not_negative, check_positive
from modelzoo_trainer.optim.functions import function_at
from modelzoo_trainer.optim.scheduler import LRScheduler, Tags, WeightDecayScheduler
from modelzoo_trainer.optim.shapes import cosine, linear


class ConstantWD(WeightDecayScheduler):
    """The same weight decay at every step; `total_iters` is its length in a sequence."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        val: float,
        total_iters: int | None = None,
        param_group_tags: Tags = None,
    ) -> None:
        if total_iters is not None:
            check_positive(self, total_iters=total_iters)
        check_not_negative(self, val=val)
        self.val = val
        self._total_iters = total_iters
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        return self.val


class LinearWD(WeightDecayScheduler):
    """A straight line from the initial to the end value, then the end."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_val: float,
        end_val: float,
        total_iters: int,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive(self, total_iters=total_iters)
        check_not_negative(self, initial_val=initial_val, end_val=end_val)
        self.initial_val = initial_val
        self.end_val = end_val
        self._total_iters = total_iters
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        return linear(self.initial_val, self.end_val, self._total_iters, step)


class CosineDecayWD(WeightDecayScheduler):
    """Half a cosine wave from the initial to the end value, then the end."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_val: float,
        end_val: float,
        total_iters: int,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive(self, total_iters=total_iters)
        check_not_negative(self, initial_val=initial_val, end_val=end_val)
        self.initial_val = initial_val
        self.end_val = end_val
        self._total_iters = total_iters
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        return cosine(self.initial_val, self.end_val, self._total_iters, step)


class LambdaWD(WeightDecayScheduler):
    """The initial value times a function of the step.

    Args:
        optimizer: Whose groups are written.
        initial_val: What the function is multiplied by.
        val_lambda: The function, `step -> factor`, or its dotted path, which is imported; None if
            a subclass defines `factor`.
        param_group_tags: Only groups with one of these tags.

    Raises:
        ConfigError: If there is no function, or two.
    """

    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_val: float,
        val_lambda: str | Callable[[int], float] | None = None,
        param_group_tags: Tags = None,
    ) -> None:
        is_overridden = type(self).factor is not LambdaWD.factor
        if (val_lambda is None) is not is_overridden:
            given = "two functions" if is_overridden else "no function"
            raise ConfigError(
                f"{self._name} has {given} of the step. Set val_lambda to the dotted path of one, "
                f"or define factor(self, step) in a subclass."
            )
        check_not_negative(self, initial_val=initial_val)
        self.initial_val = initial_val
        self._function = function_at(f"{self._name}.val_lambda", val_lambda)
        super().__init__(optimizer, param_group_tags)

    def factor(self, step: int) -> float:
        """Return by what the initial value is multiplied.

        Args:
            step: Number of optimizer steps taken.
        """
        assert self._function is not None  # the constructor demands it
        return self._function(step)

    @override
    def value(self, step: int) -> float:
        return float(self.initial_val * self.factor(step))


# What arguments are called, of schedules of the learning rate and here.
_OURS: Final = {
    "initial_learning_rate": "initial_val",
    "end_learning_rate": "end_val",
    "learning_rates": "vals",
    "base_lr": "base_val",
    "max_lr": "max_val",
}


class Following(WeightDecayScheduler):
    """Base of schedules that have the values of one of the learning rate."""

    _curve: LRScheduler

    def _follow(self, cls: type[LRScheduler], *arguments: Any) -> None:
        """Take the curve; a subclass does it first of all.

        Args:
            cls: Whose formula it is.
            *arguments: Of it, after the optimizer.

        Raises:
            ConfigError: If one does not fit; in the words of this class.
        """
        try:
            self._curve = cls(None, *arguments)
        except ConfigError as error:
            words = str(error).replace(cls.__name__, type(self).__name__)
            for theirs, ours in _OURS.items():
                words = words.replace(f".{theirs} ", f".{ours} ")
            raise ConfigError(words) from None
        self._total_iters = self._curve.total_iters

    @override
    def value(self, step: int) -> float:
        return self._curve.value(step)


class PolynomialWD(Following):
    """As `PolynomialLR`."""

    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        optimizer: Optimizer | None,
        initial_val: float,
        end_val: float,
        total_iters: int,
        power: float = 1.0,
        cycle: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        self._follow(decay.PolynomialLR, initial_val, end_val, total_iters, power, cycle)
        super().__init__(optimizer, param_group_tags)


class ExponentialWD(Following):
    """As `ExponentialLR`."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_val: float,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        self._follow(decay.ExponentialLR, initial_val, total_iters, decay_rate, staircase)
        super().__init__(optimizer, param_group_tags)


class InverseExponentialTimeDecayWD(Following):
    """As `InverseExponentialTimeDecayLR`."""

    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        optimizer: Optimizer | None,
        initial_val: float,
        step_exponent: float,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        arguments = initial_val, step_exponent, total_iters, decay_rate, staircase
        self._follow(decay.InverseExponentialTimeDecayLR, *arguments)
        super().__init__(optimizer, param_group_tags)


class InverseSquareRootDecayWD(Following):
    """As `InverseSquareRootDecayLR`."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_val: float = 1.0,
        scale: float = 1.0,
        warmup_steps: float = 1,
        param_group_tags: Tags = None,
    ) -> None:
        self._follow(decay.InverseSquareRootDecayLR, initial_val, scale, warmup_steps)
        super().__init__(optimizer, param_group_tags)


class StepWD(Following):
    """As `StepLR`."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_val: float,
        step_size: int,
        gamma: float,
        param_group_tags: Tags = None,
    ) -> None:
        self._follow(stepwise.StepLR, initial_val, step_size, gamma)
        super().__init__(optimizer, param_group_tags)


class MultiStepWD(Following):
    """As `MultiStepLR`."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_val: float,
        gamma: float,
        milestones: list[int],
        param_group_tags: Tags = None,
    ) -> None:
        self._follow(stepwise.MultiStepLR, initial_val, gamma, milestones)
        super().__init__(optimizer, param_group_tags)


class PiecewiseConstantWD(Following):
    """As `PiecewiseConstantLR`."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        vals: list[float],
        milestones: list[int],
        param_group_tags: Tags = None,
    ) -> None:
        self._follow(stepwise.PiecewiseConstantLR, vals, milestones)
        super().__init__(optimizer, param_group_tags)


class MultiplicativeWD(Following):
    """As `MultiplicativeLR`."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_val: float,
        coefficient: float,
        param_group_tags: Tags = None,
    ) -> None:
        self._follow(stepwise.MultiplicativeLR, initial_val, coefficient)
        super().__init__(optimizer, param_group_tags)


class CosineAnnealingWD(Following):
    """As `CosineAnnealingLR`."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_val: float,
        T_max: int,
        eta_min: float = 0.0,
        param_group_tags: Tags = None,
    ) -> None:
        self._follow(cycles.CosineAnnealingLR, initial_val, T_max, eta_min)
        super().__init__(optimizer, param_group_tags)


class OneCycleWD(Following):
    """As `OneCycleLR`."""

    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        optimizer: Optimizer | None,
        initial_val: float,
        max_val: float,
        total_steps: int = 1000,
        pct_start: float = 0.3,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        param_group_tags: Tags = None,
    ) -> None:
        steps = total_steps, pct_start, final_div_factor, three_phase, anneal_strategy
        self._follow(cycles.OneCycleLR, initial_val, max_val, *steps)
        super().__init__(optimizer, param_group_tags)


class CosineAnnealingWarmRestartsWD(Following):
    """As `CosineAnnealingWarmRestarts`."""

    def __init__(  # the keys of its YAML section
        self,
        optimizer: Optimizer | None,
        initial_val: float,
        T_0: int,
        T_mult: int = 1,
        eta_min: float = 0.0,
        param_group_tags: Tags = None,
    ) -> None:
        self._follow(cycles.CosineAnnealingWarmRestarts, initial_val, T_0, T_mult, eta_min)
        super().__init__(optimizer, param_group_tags)


class CyclicWD(Following):
    """As `CyclicLR`."""

    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        optimizer: Optimizer | None,
        base_val: float,
        max_val: float,
        step_size_up: int = 2000,
        step_size_down: int | None = None,
        mode: Literal["triangular", "triangular2", "exp_range"] = "triangular",
        gamma: float = 1.0,
        scale_mode: Literal["cycle", "iterations"] | None = None,
        param_group_tags: Tags = None,
    ) -> None:
        steps = step_size_up, step_size_down, mode, gamma, scale_mode
        self._follow(cycles.CyclicLR, base_val, max_val, *steps)
        super().__init__(optimizer, param_group_tags)
