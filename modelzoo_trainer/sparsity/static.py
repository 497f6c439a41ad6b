"""One mask for the whole run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.sparsity.algorithm import SparsityAlgorithm
from modelzoo_trainer.sparsity.curves import Constant, as_fraction
from modelzoo_trainer.sparsity.init_methods import InitMethod
from modelzoo_trainer.sparsity.selection import Filter


class Static(SparsityAlgorithm):
    """Keeps the mask that is made in the beginning.

    Args:
        sparsity: Fraction of the weights of each parameter that are zero, in [0, 1).
        init_method: Which weights are there: "random", "topk" (of the greatest magnitude),
            "from_zeros" (those that are not zero, whatever `sparsity` says) or "checkerboard"
            (evenly spread).
        param_filter: A glob over names of parameters, or several; None = every trainable one with
            two dimensions or more, except those of embeddings.

    Raises:
        ConfigError: If an argument does not fit.
    """

    def __init__(
        self,
        sparsity: float,
        init_method: InitMethod = "random",
        param_filter: Filter | None = None,
    ) -> None:
        super().__init__(
            fraction=Constant(as_fraction(sparsity, "Static.sparsity")),
            updates=None,
            init_method=init_method,
            param_filter=param_filter,
        )

    @override
    def new_mask(
        self, weights: Tensor, mask: Tensor, gradients: Tensor | None, numbers: Sequence[Tensor]
    ) -> Tensor:
        return mask
