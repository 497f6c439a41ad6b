"""Learning rates that go from one value to another, or towards zero."""

from __future__ import annotations

from math import floor, sqrt

from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.constraints import NonNegativeFloat, PositiveFloat, Steps, checked
from modelzoo_trainer.optim.scheduler import LRScheduler, Tags
from modelzoo_trainer.optim.shapes import cosine, linear


class ConstantLR(LRScheduler):
    """The same learning rate at every step; `total_iters` is its length in a sequence."""

    @checked()
    def __init__(
        self,
        optimizer: Optimizer | None,
        learning_rate: NonNegativeFloat,
        total_iters: Steps | None = None,
        param_group_tags: Tags = None,
    ) -> None:
        self.learning_rate = learning_rate
        self._total_iters = total_iters
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        return self.learning_rate


class PolynomialLR(LRScheduler):
    """end + (initial - end) * (1 - step / total_iters) ** power, then the end.

    With `cycle` the curve is stretched to 2, 3, ... times `total_iters` instead of ending.
    """

    @checked()
    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: NonNegativeFloat,
        end_learning_rate: NonNegativeFloat,
        total_iters: Steps,
        power: NonNegativeFloat = 1.0,
        cycle: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.end_learning_rate = end_learning_rate
        self.power = power
        self.cycle = cycle
        self._total_iters = total_iters
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        total = self._total_iters
        if step >= total:
            if not self.cycle:
                return self.end_learning_rate
            total *= step // total + 1
        span = self.initial_learning_rate - self.end_learning_rate
        return float(self.end_learning_rate + span * (1 - step / total) ** self.power)


class LinearLR(PolynomialLR):
    """A straight line from the initial to the end learning rate, then the end."""

    @checked()
    def __init__(  # the keys of its YAML section
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: NonNegativeFloat,
        end_learning_rate: NonNegativeFloat,
        total_iters: Steps,
        cycle: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(
            optimizer,
            initial_learning_rate,
            end_learning_rate,
            total_iters,
            cycle=cycle,
            param_group_tags=param_group_tags,
        )

    @override
    def value(self, step: int) -> float:
        total = self._total_iters
        if self.cycle:
            total *= step // total + 1
        return linear(self.initial_learning_rate, self.end_learning_rate, total, step)


class CosineDecayLR(LRScheduler):
    """Half a cosine wave from the initial to the end learning rate, then the end."""

    @checked()
    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: NonNegativeFloat,
        end_learning_rate: NonNegativeFloat,
        total_iters: Steps,
        param_group_tags: Tags = None,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.end_learning_rate = end_learning_rate
        self._total_iters = total_iters
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        return cosine(self.initial_learning_rate, self.end_learning_rate, self._total_iters, step)


class ExponentialLR(LRScheduler):
    """initial * decay_rate ** (step / total_iters); with `staircase` in whole powers."""

    @checked()
    def __init__(  # the keys of its YAML section
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: NonNegativeFloat,
        total_iters: Steps,
        decay_rate: PositiveFloat,
        staircase: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.decay_rate = decay_rate
        self.staircase = staircase
        self._total_iters = total_iters
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        power = step // self._total_iters if self.staircase else step / self._total_iters
        return float(self.initial_learning_rate * self.decay_rate**power)


class InverseExponentialTimeDecayLR(LRScheduler):
    """initial / (1 + decay_rate * step ** step_exponent / total_iters).

    With `staircase` the quotient is rounded down.
    """

    @checked()
    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: NonNegativeFloat,
        step_exponent: PositiveFloat,
        total_iters: Steps,
        decay_rate: PositiveFloat,
        staircase: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.step_exponent = step_exponent
        self.decay_rate = decay_rate
        self.staircase = staircase
        self._total_iters = total_iters
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        time = float(step) ** self.step_exponent / self._total_iters
        if self.staircase:
            time = floor(time)
        return float(self.initial_learning_rate / (1 + self.decay_rate * time))


class InverseSquareRootDecayLR(LRScheduler):
    """initial * scale / sqrt(max(warmup_steps, step))."""

    @checked()
    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: NonNegativeFloat = 1.0,
        scale: NonNegativeFloat = 1.0,
        warmup_steps: PositiveFloat = 1,
        param_group_tags: Tags = None,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.scale = scale
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        return self.initial_learning_rate * self.scale / sqrt(max(self.warmup_steps, step))
