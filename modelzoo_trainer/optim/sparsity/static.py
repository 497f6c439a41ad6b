"""Static sparsity and gradual magnitude pruning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.base.constraints import Fraction, checked
from modelzoo_trainer.optim.sparsity.algorithm import SparsityAlgorithm, one_of
from modelzoo_trainer.optim.sparsity.curves import Constant, Schedule, as_curve
from modelzoo_trainer.optim.sparsity.init_methods import InitMethod, ranks
from modelzoo_trainer.optim.sparsity.selection import Filter
from modelzoo_trainer.optim.sparsity.updates import UpdateEvery, UpdateSteps, as_updates


class Static(SparsityAlgorithm):
    """Static sparsity: keep the initial mask.

    Args:
        sparsity: Fraction of zero weights in each parameter, in [0, 1).
        init_method: Which weights are nonzero: "random", "topk" (the largest magnitudes),
            "from_zeros" (those that are nonzero, regardless of `sparsity`) or "checkerboard"
            (evenly spread).
        param_filter: One or more globs of parameter names; None = all trainable parameters with two
            or more dimensions, except embeddings.

    Raises:
        ConfigError: If an argument is invalid.
    """

    @checked()
    def __init__(
        self,
        sparsity: Fraction,
        init_method: InitMethod = "random",
        param_filter: Filter | None = None,
    ) -> None:
        super().__init__(
            fraction=Constant(sparsity),
            updates=None,
            init_method=init_method,
            param_filter=param_filter,
        )

    @override
    def new_mask(
        self, weights: Tensor, mask: Tensor, gradients: Tensor | None, numbers: Sequence[Tensor]
    ) -> Tensor:
        return mask


class GMP(SparsityAlgorithm):
    """Gradual magnitude pruning: zero more and more of the weights of smallest magnitude.

    From Zhu and Gupta: To prune, or not to prune: exploring the efficacy of pruning for model
    compression, 2017. Its schedule is `{type: cubic, final: 0.9, steps: 10000}`. A pruned weight
    stays zero unless the schedule decreases.

    Args:
        sparsity: Fraction of zero weights in each parameter: a number in [0, 1), or a schedule
            `{type: ..., ...}`.
        schedule: Alias of `sparsity`.
        update: When masks change, `{freq, start, stop}` or `{steps}`; None = in every step, or
            never if the fraction is constant.
        init_method: Which weights are nonzero initially; see `Static`.
        param_filter: One or more globs of parameter names; None = all trainable parameters with two
            or more dimensions, except embeddings.

    Cost: A sort of each parameter per update.

    Raises:
        ConfigError: If an argument is invalid.
    """

    @checked()
    def __init__(
        self,
        sparsity: Schedule | None = None,
        schedule: Schedule | None = None,
        update: UpdateSteps | None = None,
        init_method: InitMethod = "topk",
        param_filter: Filter | None = None,
    ) -> None:
        fraction = as_curve(one_of(schedule, sparsity, "GMP"), "GMP.sparsity")
        updates = None if isinstance(fraction, Constant) else UpdateEvery(1)
        super().__init__(
            fraction=fraction,
            updates=updates if update is None else as_updates(update, "GMP.update"),
            init_method=init_method,
            param_filter=param_filter,
        )

    @override
    def new_mask(
        self, weights: Tensor, mask: Tensor, gradients: Tensor | None, numbers: Sequence[Tensor]
    ) -> Tensor:
        _, num_kept, _ = numbers
        return ranks(torch.where(mask, weights.abs(), -1)) < num_kept
