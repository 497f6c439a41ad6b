"""Learning rate schedules from one value to another, or towards zero."""

from __future__ import annotations

from dataclasses import field
from math import cos, floor, pi, sqrt

from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.base.constraints import NonNegativeFloat, PositiveFloat, Steps
from modelzoo_trainer.optim.scheduler import LRScheduler, Tags, schedule_dataclass


@schedule_dataclass
class ConstantLR(LRScheduler):
    """A constant learning rate; `total_iters` is its length in a sequence."""

    optimizer: Optimizer | None
    learning_rate: NonNegativeFloat
    total_iters: Steps | None = None
    param_group_tags: Tags = None

    @override
    def value(self, step: int) -> float:
        return self.learning_rate


@schedule_dataclass
class PolynomialLR(LRScheduler):
    """Polynomial decay: end + (initial - end) * (1 - step / total_iters) ** power, then end.

    With `cycle`, the curve is stretched to 2, 3, ... times `total_iters` instead of ending.
    """

    optimizer: Optimizer | None
    initial_learning_rate: NonNegativeFloat
    end_learning_rate: NonNegativeFloat
    total_iters: Steps
    power: NonNegativeFloat = 1.0
    cycle: bool = False
    param_group_tags: Tags = None

    @override
    def value(self, step: int) -> float:
        total = self.total_iters
        if step >= total:
            if not self.cycle:
                return self.end_learning_rate
            total *= step // total + 1
        span = self.initial_learning_rate - self.end_learning_rate
        return float(self.end_learning_rate + span * (1 - step / total) ** self.power)


@schedule_dataclass
class LinearLR(PolynomialLR):
    """Linear change from the initial to the end learning rate, then the end value."""

    power: float = field(default=1.0, init=False)

    @override
    def value(self, step: int) -> float:
        total = self.total_iters
        if self.cycle:
            total *= step // total + 1
        start, end = self.initial_learning_rate, self.end_learning_rate
        return end if step >= total else end + (start - end) * (1 - step / total)


@schedule_dataclass
class CosineDecayLR(LRScheduler):
    """Cosine decay from the initial to the end learning rate, then the end value."""

    optimizer: Optimizer | None
    initial_learning_rate: NonNegativeFloat
    end_learning_rate: NonNegativeFloat
    total_iters: Steps
    param_group_tags: Tags = None

    @override
    def value(self, step: int) -> float:
        start, end, total = self.initial_learning_rate, self.end_learning_rate, self.total_iters
        return end if step >= total else cosine_wave(start, end, total, step)


@schedule_dataclass
class ExponentialLR(LRScheduler):
    """Exponential decay: initial * decay_rate ** (step / total_iters).

    With `staircase`, the exponent is rounded down.
    """

    optimizer: Optimizer | None
    initial_learning_rate: NonNegativeFloat
    total_iters: Steps
    decay_rate: PositiveFloat
    staircase: bool = False
    param_group_tags: Tags = None

    @override
    def value(self, step: int) -> float:
        power = step // self.total_iters if self.staircase else step / self.total_iters
        return float(self.initial_learning_rate * self.decay_rate**power)


@schedule_dataclass
class InverseExponentialTimeDecayLR(LRScheduler):
    """Inverse decay: initial / (1 + decay_rate * step ** step_exponent / total_iters).

    With `staircase`, the quotient is rounded down.
    """

    optimizer: Optimizer | None
    initial_learning_rate: NonNegativeFloat
    step_exponent: PositiveFloat
    total_iters: Steps
    decay_rate: PositiveFloat
    staircase: bool = False
    param_group_tags: Tags = None

    @override
    def value(self, step: int) -> float:
        time = float(step) ** self.step_exponent / self.total_iters
        if self.staircase:
            time = floor(time)
        return float(self.initial_learning_rate / (1 + self.decay_rate * time))


@schedule_dataclass
class InverseSquareRootDecayLR(LRScheduler):
    """Inverse square root decay: initial * scale / sqrt(max(warmup_steps, step))."""

    optimizer: Optimizer | None
    initial_learning_rate: NonNegativeFloat = 1.0
    scale: NonNegativeFloat = 1.0
    warmup_steps: PositiveFloat = 1
    param_group_tags: Tags = None

    @override
    def value(self, step: int) -> float:
        return self.initial_learning_rate * self.scale / sqrt(max(self.warmup_steps, step))


def cosine_wave(start: float, end: float, half: float, step: float) -> float:
    """Return the value of a cosine wave that is `end` at every odd multiple of `half`."""
    return end + (start - end) * (1 + cos(pi * step / half)) / 2
