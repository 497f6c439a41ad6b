"""Masks that move: the weakest weights are dropped, and others grown in their stead."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.sparsity.algorithm import SparsityAlgorithm, limited
from modelzoo_trainer.sparsity.curves import Curve, as_curve
from modelzoo_trainer.sparsity.ranking import Layout, ranks
from modelzoo_trainer.sparsity.selection import Filter
from modelzoo_trainer.sparsity.updates import Updates, as_updates


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

    def __init__(
        self,
        *,
        fraction: Any,
        drop_fraction: float | dict[str, Any] | Curve,
        update: dict[str, Any] | Updates,
        init_method: str,
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
