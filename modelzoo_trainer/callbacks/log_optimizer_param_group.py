"""Values of the optimizer's parameter groups, such as the learning rate."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Number
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import Callback, Metrics
from modelzoo_trainer.errors import ConfigError, suggest

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class LogOptimizerParamGroup(Callback):
    """Logs values of each parameter group as `<key>/<group>`, on log steps.

    They are those that the step was taken with: a scheduler acts afterwards.

    Args:
        keys: A key of the groups, such as "lr", or several.

    Metrics:
        <key>/<group>: The value as it is in the group, which is counted from 0.

    Raises:
        ConfigError: At set-up, if no group has a key, or its value is no number.
    """

    log_step_hooks = frozenset({"on_after_optimizer_step"})

    def __init__(self, keys: str | Iterable[str]) -> None:
        self._keys = (keys,) if isinstance(keys, str) else tuple(keys)

    @override
    def setup(self, trainer: Trainer) -> None:
        if not trainer.has_optimizer:
            return
        groups = trainer.optimizer.param_groups
        for key in self._keys:
            values = [group[key] for group in groups if key in group]
            if not values:
                known = {name for group in groups for name in group if name != "params"}
                raise ConfigError(
                    f"keys: {key!r} is in no parameter group of "
                    f"{type(trainer.optimizer).__name__}. {suggest(key, known)}"
                )
            for value in values:
                if not _is_number(value):
                    raise ConfigError(
                        f"keys: {key!r} is {value!r} in the parameter groups; only numbers can "
                        f"be logged."
                    )

    @override
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        metrics: Metrics = {}
        for key in self._keys:
            for idx, group in enumerate(optimizer.param_groups):
                value = group.get(key)
                if value is not None:
                    # A scheduler fills a tensor in place before it is read.
                    kept = value.detach().clone() if isinstance(value, Tensor) else value
                    metrics[f"{key}/{idx}"] = kept
        trainer.log_metrics_dict(metrics)


def _is_number(value: object) -> bool:
    return (
        value is None
        or isinstance(value, Number)
        or (isinstance(value, Tensor) and value.numel() == 1)
    )
