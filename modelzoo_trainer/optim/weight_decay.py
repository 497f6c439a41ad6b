"""Schedules of weight decay."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.checks import check_not_negative, check_positive
from modelzoo_trainer.optim.functions import function_at
from modelzoo_trainer.optim.scheduler import Tags, WeightDecayScheduler
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
