"""Learning rates that rise and fall."""

from __future__ import annotations

from math import cos, pi
from typing import Literal

from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.constraints import NonNegativeFloat, PositiveFloat, Steps, checked
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.scheduler import LRScheduler, Tags
from modelzoo_trainer.optim.shapes import cosine_wave


class CosineAnnealingLR(LRScheduler):
    """A cosine wave: from the initial learning rate to `eta_min` in `T_max` steps, and back."""

    @checked()
    def __init__(
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: NonNegativeFloat,
        T_max: Steps,
        eta_min: NonNegativeFloat = 0.0,
        param_group_tags: Tags = None,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.T_max = T_max
        self.eta_min = eta_min
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        return cosine_wave(self.initial_learning_rate, self.eta_min, self.T_max, step)


class CosineAnnealingWarmRestarts(LRScheduler):
    """Half a cosine wave of `T_0` steps again and again, each `T_mult` times as long."""

    @checked()
    def __init__(  # the keys of its YAML section
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: NonNegativeFloat,
        T_0: Steps,
        T_mult: Steps = 1,
        eta_min: NonNegativeFloat = 0.0,
        param_group_tags: Tags = None,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.T_0 = T_0
        self.T_mult = T_mult
        self.eta_min = eta_min
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        length = self.T_0
        if self.T_mult == 1:
            step %= length
        while step >= length:
            step -= length
            length *= self.T_mult
        return cosine_wave(self.initial_learning_rate, self.eta_min, length, step)


class CyclicLR(LRScheduler):
    """Up from `base_lr` to `max_lr` in straight lines and down again.

    Args:
        optimizer: Whose groups are written.
        base_lr: The lower end.
        max_lr: The upper end of the first cycle.
        step_size_up: Steps on the way up.
        step_size_down: Steps on the way down; None for as many.
        mode: The height of a cycle: the same, halved each time, or times gamma ** step.
        gamma: For `exp_range`.
        scale_mode: Whether the height depends on the cycle or on the step; None for what the
            mode says.
        param_group_tags: Only groups with one of these tags.
    """

    @checked()
    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        optimizer: Optimizer | None,
        base_lr: NonNegativeFloat,
        max_lr: NonNegativeFloat,
        step_size_up: Steps = 2000,
        step_size_down: Steps | None = None,
        mode: Literal["triangular", "triangular2", "exp_range"] = "triangular",
        gamma: PositiveFloat = 1.0,
        scale_mode: Literal["cycle", "iterations"] | None = None,
        param_group_tags: Tags = None,
    ) -> None:
        step_size_down = step_size_up if step_size_down is None else step_size_down
        if scale_mode is None:
            scale_mode = "iterations" if mode == "exp_range" else "cycle"
        self.base_lr = base_lr
        self.max_lr = max_lr
        self.step_size_up = step_size_up
        self.step_size_down = step_size_down
        self.mode = mode
        self.gamma = gamma
        self.scale_mode = scale_mode
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        cycle, inside = divmod(step, self.step_size_up + self.step_size_down)
        if inside <= self.step_size_up:
            height = inside / self.step_size_up
        else:
            height = 1 - (inside - self.step_size_up) / self.step_size_down
        at = cycle + 1 if self.scale_mode == "cycle" else step
        return self.base_lr + (self.max_lr - self.base_lr) * height * self._scale(at)

    def _scale(self, at: int) -> float:
        if self.mode == "triangular":
            return 1.0
        if self.mode == "triangular2":
            return 2.0 ** (1 - at)
        return float(self.gamma**at)


class OneCycleLR(LRScheduler):
    """Up to `max_lr`, and down to far below the initial learning rate, where it stays.

    Args:
        optimizer: Whose groups are written.
        initial_learning_rate: At the first step.
        max_lr: The highest.
        total_steps: Length of the cycle.
        pct_start: Fraction of the cycle on the way up.
        final_div_factor: Of the initial learning rate, to the last.
        three_phase: Whether to come down to the initial learning rate as fast as up.
        anneal_strategy: Cosine waves or straight lines.
        param_group_tags: Only groups with one of these tags.
    """

    @checked()
    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        optimizer: Optimizer | None,
        initial_learning_rate: NonNegativeFloat,
        max_lr: NonNegativeFloat,
        total_steps: Steps = 1000,
        pct_start: float = 0.3,
        final_div_factor: PositiveFloat = 1e4,
        three_phase: bool = False,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        param_group_tags: Tags = None,
    ) -> None:
        self.anneal_strategy = anneal_strategy
        lowest = initial_learning_rate / final_div_factor
        up = float(pct_start * total_steps) - 1
        if three_phase:
            ends = [up, 2 * up, total_steps - 1]
            rates = [initial_learning_rate, max_lr, initial_learning_rate, lowest]
        else:
            ends = [up, total_steps - 1]
            rates = [initial_learning_rate, max_lr, lowest]
        starts = [0.0, *ends[:-1]]
        if any(end <= start for start, end in zip(starts, ends, strict=True)):
            raise ConfigError(
                f"OneCycleLR.pct_start is {pct_start} of {total_steps} total_steps, which leaves a "
                f"phase without steps. Choose a fraction of more than one step, and below "
                f"{0.5 if three_phase else 1}."
            )
        self._phases = list(zip(starts, ends, rates, rates[1:], strict=False))
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        for start, end, before, after in self._phases:
            if step <= end:
                done = (step - start) / (end - start)
                if self.anneal_strategy == "cos":
                    done = (1 - cos(pi * done)) / 2
                return before + (after - before) * done
        return self._phases[-1][-1]
