"""Schedules of weight decay."""

from __future__ import annotations

from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.optim.checks import check_positive
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
        self.initial_val = initial_val
        self.end_val = end_val
        self._total_iters = total_iters
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        return cosine(self.initial_val, self.end_val, self._total_iters, step)
