"""Rigging the lottery."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.sparsity.algorithm import one_of
from modelzoo_trainer.sparsity.curves import Curve
from modelzoo_trainer.sparsity.dynamic import DropAndGrow
from modelzoo_trainer.sparsity.init_methods import InitMethod
from modelzoo_trainer.sparsity.ranking import Layout
from modelzoo_trainer.sparsity.selection import Filter
from modelzoo_trainer.sparsity.updates import Updates


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

    def __init__(  # noqa: PLR0913  # the section's keys
        self,
        sparsity: float | dict[str, Any] | Curve | None = None,
        schedule: float | dict[str, Any] | Curve | None = None,
        *,
        update: dict[str, Any] | Updates,
        drop_fraction: float | dict[str, Any] | Curve = 0.3,
        balance_in_groups: int | None = None,
        balance_out_groups: int | None = None,
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
    for name, num in (("in", num_in), ("out", num_out)):
        if num is not None and (isinstance(num, bool) or not isinstance(num, int) or num < 1):
            raise ConfigError(
                f"RigL.balance_{name}_groups is {num!r}; it must be a whole number > 0."
            )
    if num_in is not None and num_out is not None:
        raise ConfigError(
            "RigL: balance_in_groups and balance_out_groups are both given; they exclude each "
            "other."
        )
    if num_in is not None:
        return Layout(dim=1, num=num_in)
    return Layout(dim=0, num=num_out or 1)
