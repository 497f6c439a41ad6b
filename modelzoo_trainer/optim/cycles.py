"""Cyclic learning rate schedules."""

from __future__ import annotations

from math import cos, pi
from typing import Literal

from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.base.constraints import NonNegativeFloat, PositiveFloat, Steps
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.decay import cosine_wave
from modelzoo_trainer.optim.scheduler import LRScheduler, Tags, schedule_dataclass


@schedule_dataclass
class CosineAnnealingLR(LRScheduler):
    """A cosine wave from the initial learning rate to `eta_min` in `T_max` steps, and back."""

    optimizer: Optimizer | None
    initial_learning_rate: NonNegativeFloat
    T_max: Steps
    eta_min: NonNegativeFloat = 0.0
    param_group_tags: Tags = None

    @override
    def value(self, step: int) -> float:
        return cosine_wave(self.initial_learning_rate, self.eta_min, self.T_max, step)


@schedule_dataclass
class CosineAnnealingWarmRestarts(LRScheduler):
    """Cosine decay with warm restarts: cycles of `T_0` steps, each `T_mult` times longer."""

    optimizer: Optimizer | None
    initial_learning_rate: NonNegativeFloat
    T_0: Steps
    T_mult: Steps = 1
    eta_min: NonNegativeFloat = 0.0
    param_group_tags: Tags = None

    @override
    def value(self, step: int) -> float:
        length = self.T_0
        if self.T_mult == 1:
            step %= length
        while step >= length:
            step -= length
            length *= self.T_mult
        return cosine_wave(self.initial_learning_rate, self.eta_min, length, step)


@schedule_dataclass
class CyclicLR(LRScheduler):
    """Linear cycles from `base_lr` up to `max_lr` and back.

    Args:
        optimizer: Optimizer whose parameter groups are updated.
        base_lr: Minimum learning rate.
        max_lr: Maximum learning rate of the first cycle.
        step_size_up: Number of increasing steps.
        step_size_down: Number of decreasing steps; None = `step_size_up`.
        mode: Amplitude of a cycle: constant, halved in each cycle, or times gamma ** step.
        gamma: For `exp_range`.
        scale_mode: Whether the amplitude depends on the cycle or on the step; None = by `mode`.
        param_group_tags: Update only groups with one of these tags.
    """

    optimizer: Optimizer | None
    base_lr: NonNegativeFloat
    max_lr: NonNegativeFloat
    step_size_up: Steps = 2000
    step_size_down: Steps | None = None
    mode: Literal["triangular", "triangular2", "exp_range"] = "triangular"
    gamma: PositiveFloat = 1.0
    scale_mode: Literal["cycle", "iterations"] | None = None
    param_group_tags: Tags = None

    @override
    def __post_init__(self) -> None:
        if self.step_size_down is None:
            self.step_size_down = self.step_size_up
        if self.scale_mode is None:
            self.scale_mode = "iterations" if self.mode == "exp_range" else "cycle"
        super().__post_init__()

    @override
    def value(self, step: int) -> float:
        down = self.step_size_down
        assert down is not None  # set above if it was not given
        cycle, inside = divmod(step, self.step_size_up + down)
        if inside <= self.step_size_up:
            height = inside / self.step_size_up
        else:
            height = 1 - (inside - self.step_size_up) / down
        at = cycle + 1 if self.scale_mode == "cycle" else step
        return self.base_lr + (self.max_lr - self.base_lr) * height * self._scale(at)

    def _scale(self, at: int) -> float:
        if self.mode == "triangular":
            return 1.0
        if self.mode == "triangular2":
            return 2.0 ** (1 - at)
        return float(self.gamma**at)


@schedule_dataclass
class OneCycleLR(LRScheduler):
    """One cycle: up to `max_lr`, then down to far below the initial learning rate.

    Args:
        optimizer: Optimizer whose parameter groups are updated.
        initial_learning_rate: Learning rate at step 0.
        max_lr: Maximum learning rate.
        total_steps: Length of the cycle; the learning rate is constant afterwards.
        pct_start: Increasing fraction of the cycle.
        final_div_factor: Ratio of the initial to the final learning rate.
        three_phase: Whether to return to the initial learning rate as fast as it increased, before
            the final decay.
        anneal_strategy: Cosine or linear.
        param_group_tags: Update only groups with one of these tags.
    """

    optimizer: Optimizer | None
    initial_learning_rate: NonNegativeFloat
    max_lr: NonNegativeFloat
    total_steps: Steps = 1000
    pct_start: float = 0.3
    final_div_factor: PositiveFloat = 1e4
    three_phase: bool = False
    anneal_strategy: Literal["cos", "linear"] = "cos"
    param_group_tags: Tags = None

    @property
    def total_iters(self) -> int:  # type: ignore[override]  # of a sequence; the same thing
        """Length, as other schedules call it."""
        return self.total_steps

    @override
    def __post_init__(self) -> None:
        initial, total = self.initial_learning_rate, self.total_steps
        lowest = initial / self.final_div_factor
        up = float(self.pct_start * total) - 1
        if self.three_phase:
            ends = [up, 2 * up, total - 1]
            rates = [initial, self.max_lr, initial, lowest]
        else:
            ends = [up, total - 1]
            rates = [initial, self.max_lr, lowest]
        starts = [0.0, *ends[:-1]]
        if any(end <= start for start, end in zip(starts, ends, strict=True)):
            low, high = 1 / total, 0.5 if self.three_phase else 1
            advice = (
                f"Use a value larger than {low:.3g} (one step) and less than {high}."
                if low < high
                else "Increase total_steps."
            )
            raise ConfigError(
                f"OneCycleLR.pct_start={self.pct_start} with total_steps={total} leaves a phase "
                f"without steps. {advice}"
            )
        self._phases = list(zip(starts, ends, rates, rates[1:], strict=False))
        super().__post_init__()

    @override
    def value(self, step: int) -> float:
        for start, end, before, after in self._phases:
            if step <= end:
                done = (step - start) / (end - start)
                if self.anneal_strategy == "cos":
                    done = (1 - cos(pi * done)) / 2
                return before + (after - before) * done
        return self._phases[-1][-1]
