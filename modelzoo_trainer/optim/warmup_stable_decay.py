"""Warmup-stable-decay (WSD) schedule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import cos, pi, sqrt
from typing import Literal

from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.base.constraints import (
    FinitePositiveFloat,
    Fraction,
    NonNegativeFloat,
    NonNegativeSteps,
    Steps,
)
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.scheduler import LRScheduler, Tags, schedule_dataclass

Shape = Literal["linear", "cosine", "sqrt", "inverse"]


@schedule_dataclass
class WarmupStableDecay(LRScheduler):
    """Warm up to a learning rate, keep it, and decay it in the last part of the run (WSD).

    A decay that ends at step `n` begins at `n - round(decay_ratio * n)`. With `checkpoint_steps`,
    there are several decays (Wen et al. 2024, arXiv:2410.05192, section 4): each produces a usable
    model, and training continues from there at the full learning rate. To train longer, with a
    larger `total_iters`, resume from the checkpoint before the last decay. `WSDCheckpoint` writes
    both.

    Args:
        optimizer: Optimizer whose parameter groups are updated.
        learning_rate: Learning rate of the stable part.
        total_iters: Step at which the last decay ends, > 0.
        warmup_steps: Number of steps of the linear warmup.
        initial_learning_rate: Learning rate at step 0, if there is a warmup.
        decay_ratio: Length of a decay as a fraction of the steps until its end, in [0, 1).
        end_learning_rate: Learning rate at the end of a decay.
        decay_shape: Shape of a decay: linear; half a cosine wave; 1 - sqrt(fraction of the decay);
            or linear in 1 / learning rate, which requires an end above 0.
        checkpoint_steps: Steps before `total_iters` at which other decays end, increasing.
        param_group_tags: Update only groups with one of these tags.
    """

    optimizer: Optimizer | None
    learning_rate: FinitePositiveFloat
    total_iters: Steps
    warmup_steps: NonNegativeSteps = 0
    initial_learning_rate: NonNegativeFloat = 0.0
    decay_ratio: Fraction = 0.1
    end_learning_rate: NonNegativeFloat = 0.0
    decay_shape: Shape = "linear"
    checkpoint_steps: list[int] | None = None
    param_group_tags: Tags = None

    @override
    def __post_init__(self) -> None:
        if self.decay_shape == "inverse" and self.end_learning_rate == 0:
            raise ConfigError(
                f"{self._name}.end_learning_rate is 0, but this decay_shape divides by it. Set it "
                f"above 0, or use another decay_shape."
            )
        self._decays = self._find_decays([*(self.checkpoint_steps or ()), self.total_iters])
        super().__post_init__()

    def _find_decays(self, ends: Sequence[int]) -> list[tuple[int, int]]:
        if len(ends) > 1:
            _check_ends(self._name, ends)
        decays = [(end - round(self.decay_ratio * end), end) for end in ends]
        before = self.warmup_steps
        for begin, end in decays:
            if begin < before:
                what = "the warmup" if before == self.warmup_steps else "the previous decay"
                raise ConfigError(
                    f"{self._name}: the decay that ends at step {end} would begin at step {begin}, "
                    f"before {what} ends at step {before}. Decrease decay_ratio "
                    f"({self.decay_ratio}), or move the steps apart."
                )
            before = end
        return decays

    def get_checkpoint_steps(self) -> list[tuple[int, int]]:
        """Return the steps at which each decay begins and ends, in order."""
        return list(self._decays)

    @override
    def value(self, step: int) -> float:
        if step < self.warmup_steps:
            start = self.initial_learning_rate
            return start + (self.learning_rate - start) * step / self.warmup_steps
        for begin, end in self._decays:
            if begin <= step < end:
                return self._decayed((step - begin) / (end - begin))
        return self.learning_rate if step < self.total_iters else self.end_learning_rate

    def _decayed(self, share: float) -> float:
        peak, end = self.learning_rate, self.end_learning_rate
        if self.decay_shape == "inverse":
            return 1 / (share / end + (1 - share) / peak)
        if self.decay_shape == "cosine":
            share = (1 - cos(pi * share)) / 2
        elif self.decay_shape == "sqrt":
            share = sqrt(share)
        return peak + (end - peak) * share


def _check_ends(name: str, ends: Sequence[int]) -> None:
    *steps, total = ends
    if steps[0] <= 0 or any(after <= before for before, after in pairwise(ends)):
        raise ConfigError(
            f"{name}.checkpoint_steps is {steps}; they must be > 0, increasing, and below "
            f"total_iters ({total})."
        )
