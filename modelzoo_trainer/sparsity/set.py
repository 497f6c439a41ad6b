"""Sparse evolutionary training."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.sparsity.algorithm import one_of
from modelzoo_trainer.sparsity.curves import Curve
from modelzoo_trainer.sparsity.dynamic import DropAndGrow
from modelzoo_trainer.sparsity.init_methods import InitMethod
from modelzoo_trainer.sparsity.ranking import random_scores
from modelzoo_trainer.sparsity.selection import Filter
from modelzoo_trainer.sparsity.updates import Updates


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

    def __init__(  # noqa: PLR0913  # the section's keys
        self,
        sparsity: float | dict[str, Any] | Curve | None = None,
        schedule: float | dict[str, Any] | Curve | None = None,
        *,
        update: dict[str, Any] | Updates,
        drop_fraction: float | dict[str, Any] | Curve = 0.3,
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
