"""Dynamic sparsity, which drops the weakest weights and grows others: SET, RigL."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.base.constraints import PositiveInt, checked
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.sparsity.algorithm import SparsityAlgorithm, limited, one_of
from modelzoo_trainer.optim.sparsity.curves import Schedule, as_curve
from modelzoo_trainer.optim.sparsity.init_methods import (
    InitMethod,
    RankingGroups,
    random_scores,
    ranks,
)
from modelzoo_trainer.optim.sparsity.selection import Filter
from modelzoo_trainer.optim.sparsity.updates import UpdateSteps, as_updates


class DropAndGrow(SparsityAlgorithm):
    """Drop the weights of smallest magnitude and grow the same number, starting at zero.

    Args:
        fraction: Fraction of zero weights in each parameter.
        drop_fraction: Fraction of the nonzero weights that an update drops.
        update: When masks change.
        init_method: Which weights are nonzero initially.
        param_filter: Which parameters.
        layout: How weights are divided into groups with the same fraction.
    """

    @checked()
    def __init__(
        self,
        *,
        fraction: Schedule,
        drop_fraction: Schedule,
        update: UpdateSteps,
        init_method: InitMethod,
        param_filter: Filter | None,
        layout: RankingGroups | None = None,
    ) -> None:
        name = type(self).__name__
        self.drop_fraction = as_curve(drop_fraction, f"{name}.drop_fraction")
        super().__init__(
            fraction=as_curve(fraction, f"{name}.sparsity"),
            updates=as_updates(update, f"{name}.update"),
            init_method=init_method,
            param_filter=param_filter,
            layout=layout,
        )

    @override
    def num_surviving(self, step: int, size: int) -> int:
        num_kept = self.num_kept(step, size)
        return num_kept - round(
            limited(self.drop_fraction.value(*self.last_update(step))) * num_kept
        )

    @override
    def new_mask(
        self, weights: Tensor, mask: Tensor, gradients: Tensor | None, numbers: Sequence[Tensor]
    ) -> Tensor:
        num_surviving, num_kept, key = numbers
        survives = mask & (ranks(torch.where(mask, weights.abs(), -1)) < num_surviving)
        promise = self.promise(weights, gradients, key)
        most = torch.inf if promise.is_floating_point() else 2**62
        # A dropped weight may be grown again at once, with its current value.
        return ranks(torch.where(survives, most, promise)) < num_kept

    @abstractmethod
    def promise(self, weights: Tensor, gradients: Tensor | None, key: Tensor) -> Tensor:
        """Return scores; the weights with the largest ones grow.

        Args:
            weights: (groups, weights in a group).
            gradients: Same shape; None unless `needs_gradients`.
            key: Random key, (2,).

        Returns:
            Same shape, finite.
        """


class SET(DropAndGrow):
    """Sparse Evolutionary Training: drop weights of smallest magnitude, grow random ones.

    From Mocanu et al.: Scalable training of artificial neural networks with adaptive sparse
    connectivity inspired by network science, 2018. The grown weights are a function of the run's
    seed, the step and the parameter's name, hence the same on all processes and after resuming.

    Args:
        sparsity: Fraction of zero weights in each parameter: a number in [0, 1), or a schedule
            `{type: ..., ...}`.
        schedule: Alias of `sparsity`.
        update: When masks change: `{freq, start, stop}` or `{steps}`.
        drop_fraction: Fraction of the nonzero weights that an update drops; as `sparsity`.
        init_method: Which weights are nonzero initially; see `Static`.
        param_filter: One or more globs of parameter names; None = all trainable parameters with two
            or more dimensions, except embeddings.
        ensure_sparsity_fraction: None or True: the fraction is exact after each update.

    Cost: Two sorts of each parameter per update.

    Raises:
        ConfigError: If an argument is invalid.
    """

    @checked()
    def __init__(  # noqa: PLR0913  # the section's keys
        self,
        sparsity: Schedule | None = None,
        schedule: Schedule | None = None,
        *,
        update: UpdateSteps,
        drop_fraction: Schedule = 0.3,
        init_method: InitMethod = "random",
        param_filter: Filter | None = None,
        ensure_sparsity_fraction: bool | None = None,
    ) -> None:
        if ensure_sparsity_fraction not in (None, True):
            raise ConfigError(
                f"SET.ensure_sparsity_fraction is {ensure_sparsity_fraction!r}; the fraction is "
                f"always met exactly. Set it to true, or remove it."
            )
        super().__init__(
            fraction=one_of(schedule, sparsity, "SET"),
            drop_fraction=drop_fraction,
            update=update,
            init_method=init_method,
            param_filter=param_filter,
        )

    @override
    def promise(self, weights: Tensor, gradients: Tensor | None, key: Tensor) -> Tensor:
        return random_scores(weights, key)


class RigL(DropAndGrow):
    """RigL: drop weights of smallest magnitude, grow those with the largest gradients.

    From Evci et al.: Rigging the lottery: making all tickets winners, 2020. Gradients belong to
    the current optimizer step, accumulated and unclipped; if one of them is not finite, masks do
    not change. A parameter without a gradient keeps its mask.

    Args:
        sparsity: Fraction of zero weights in each parameter: a number in [0, 1), or a schedule
            `{type: ..., ...}`.
        schedule: Alias of `sparsity`.
        update: When masks change: `{freq, start, stop}` or `{steps}`.
        drop_fraction: Fraction of the nonzero weights that an update drops; as `sparsity`.
        balance_in_groups: Number of groups of inputs (the second dimension), each of which has the
            fraction; excludes `balance_out_groups`.
        balance_out_groups: Likewise for outputs (the first dimension).
        init_method: Which weights are nonzero initially; see `Static`.
        param_filter: One or more globs of parameter names; None = all trainable parameters with two
            or more dimensions, except embeddings.

    Cost: Two sorts of each parameter per update.

    Raises:
        ConfigError: If an argument is invalid.
    """

    needs_gradients: ClassVar[bool] = True

    @checked()
    def __init__(  # noqa: PLR0913  # the section's keys
        self,
        sparsity: Schedule | None = None,
        schedule: Schedule | None = None,
        *,
        update: UpdateSteps,
        drop_fraction: Schedule = 0.3,
        balance_in_groups: PositiveInt | None = None,
        balance_out_groups: PositiveInt | None = None,
        init_method: InitMethod = "random",
        param_filter: Filter | None = None,
    ) -> None:
        super().__init__(
            fraction=one_of(schedule, sparsity, "RigL"),
            drop_fraction=drop_fraction,
            update=update,
            init_method=init_method,
            param_filter=param_filter,
            layout=_layout(balance_in_groups, balance_out_groups),
        )

    @override
    def promise(self, weights: Tensor, gradients: Tensor | None, key: Tensor) -> Tensor:
        assert gradients is not None  # see needs_gradients
        sizes = gradients.abs()
        return torch.where(sizes.isfinite(), sizes, 0)


def _layout(num_in: int | None, num_out: int | None) -> RankingGroups:
    if num_in is not None and num_out is not None:
        raise ConfigError(
            "RigL: balance_in_groups and balance_out_groups are both given. Remove one of them."
        )
    if num_in is not None:
        return RankingGroups(dim=1, num=num_in)
    return RankingGroups(dim=0, num=num_out or 1)
