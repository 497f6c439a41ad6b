"""Masks that move, the weakest weights dropped and others grown: SET, RigL."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.constraints import PositiveInt, checked
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.sparsity.algorithm import SparsityAlgorithm, limited, one_of
from modelzoo_trainer.sparsity.curves import Schedule, as_curve
from modelzoo_trainer.sparsity.init_methods import InitMethod, Layout, random_scores, ranks
from modelzoo_trainer.sparsity.selection import Filter
from modelzoo_trainer.sparsity.updates import UpdateSteps, as_updates


class DropAndGrow(SparsityAlgorithm):
    """Drops the weights of the least magnitude and grows as many others, which begin at zero.

    Args:
        fraction: Of the weights of each parameter that are zero.
        drop_fraction: Of the weights that are there, how many an update drops.
        update: When masks change.
        init_method: Which weights are there in the beginning.
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
        layout: Layout | None = None,
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
        # One that was dropped may come back at once, with the value that it has.
        return ranks(torch.where(survives, most, promise)) < num_kept

    @abstractmethod
    def promise(self, weights: Tensor, gradients: Tensor | None, key: Tensor) -> Tensor:
        """Return numbers of which the greatest decide what grows.

        Args:
            weights: (groups, weights of a group).
            gradients: Of the same shape; None unless `needs_gradients`.
            key: For random numbers, (2,).

        Returns:
            Of the same shape, finite.
        """


class SET(DropAndGrow):
    """Drops the weights of the least magnitude and grows others at random.

    From Mocanu et al.: Scalable training of artificial neural networks with adaptive sparse
    connectivity inspired by network science, 2018. What grows is a function of the run's seed, the
    step and the parameter's name, so that resuming and other processes have the same.

    Args:
        sparsity: Fraction of the weights of each parameter that are zero: a number in [0, 1), or a
            schedule `{type: ..., ...}` of the step.
        schedule: Another name of `sparsity`.
        update: When masks change: `{freq, start, stop}` or `{steps}`.
        drop_fraction: Of the weights that are there, how many an update drops; as `sparsity`.
        init_method: Which weights are there in the beginning, as of `Static`.
        param_filter: A glob over names of parameters, or several; None = every trainable one with
            two dimensions or more, except those of embeddings.
        ensure_sparsity_fraction: None or True: the fraction is met exactly after each update.

    Cost: Two sorts of each parameter an update.

    Raises:
        ConfigError: If an argument does not fit.
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
                f"always met exactly. Write true, or leave it out."
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
    """Drops the weights of the least magnitude and grows those with the greatest gradients.

    From Evci et al.: Rigging the lottery: making all tickets winners, 2020. The gradients are
    those of the optimizer step at hand, accumulation included, before clipping; if one of them is
    not finite, masks stay as they are. A parameter without a gradient keeps its mask.

    Args:
        sparsity: Fraction of the weights of each parameter that are zero: a number in [0, 1), or a
            schedule `{type: ..., ...}` of the step.
        schedule: Another name of `sparsity`.
        update: When masks change: `{freq, start, stop}` or `{steps}`.
        drop_fraction: Of the weights that are there, how many an update drops; as `sparsity`.
        balance_in_groups: So many groups of inputs (the second dimension) have the fraction each;
            excludes the next one.
        balance_out_groups: Likewise of outputs (the first dimension).
        init_method: Which weights are there in the beginning, as of `Static`.
        param_filter: A glob over names of parameters, or several; None = every trainable one with
            two dimensions or more, except those of embeddings.

    Cost: Two sorts of each parameter an update.

    Raises:
        ConfigError: If an argument does not fit.
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


def _layout(num_in: int | None, num_out: int | None) -> Layout:
    if num_in is not None and num_out is not None:
        raise ConfigError(
            "RigL: balance_in_groups and balance_out_groups are both given; they exclude each "
            "other."
        )
    if num_in is not None:
        return Layout(dim=1, num=num_in)
    return Layout(dim=0, num=num_out or 1)
