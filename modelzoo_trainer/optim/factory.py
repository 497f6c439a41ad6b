"""Deferred creation of an optimizer, before its model exists."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.optim.optimizer import groups_of, one_lr
from modelzoo_trainer.optim.registry import OPTIMIZERS


class OptimizerFactory:
    """A callable `model -> optimizer`, for `Trainer(optimizer=...)`.

    Args:
        cls: One of `OPTIMIZERS`, or any other subclass of torch's `Optimizer`, which gets the
            parameter groups and the aliases of the shipped ones.
        kwargs: Its arguments: `lr` or `learning_rate`, `params` (filters that tag parameters),
            `adjust_learning_rate` (factors on the model's adjustment groups), others.

    Raises:
        ConfigError: If `cls` is not an optimizer, or does not take an argument.
    """

    def __init__(self, cls: type[Optimizer], kwargs: Mapping[str, Any]) -> None:
        if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
            raise ConfigError(
                f"OptimizerFactory: {cls!r} is not a subclass of torch.optim.Optimizer. Pass a "
                f"class such as torch.optim.AdamW."
            )
        self.cls = cls
        self.kwargs = dict(kwargs)
        self._is_shipped = issubclass(cls, tuple(OPTIMIZERS.values()))
        names = inspect.signature(cls).parameters
        self._takes_lr = "lr" in names
        self._default_decay = names["weight_decay"].default if "weight_decay" in names else None
        is_open = any(one.kind is one.VAR_KEYWORD for one in names.values())
        fits = {*list(names)[1:], "lr", "learning_rate", "params", "adjust_learning_rate"}
        for name in self.kwargs:
            if name not in fits and not is_open:
                raise ConfigError(
                    f"{cls.__name__} takes no argument {name!r}. {suggest(name, fits)}"
                )

    def __call__(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of the parameters of `model`.

        Args:
            model: Already on its device, if the backend replaces parameters when it moves them.
        """
        make: Any = self.cls
        kwargs = dict(self.kwargs)
        if not self._is_shipped:
            lr, learning_rate = kwargs.pop("lr", None), kwargs.pop("learning_rate", None)
            given = one_lr(self.cls.__name__, lr, learning_rate, 1e-3)
            if self._takes_lr or (lr, learning_rate) != (None, None):
                kwargs["lr"] = given
            decay = kwargs.get("weight_decay", self._default_decay)
            params, factors = kwargs.pop("params", None), kwargs.pop("adjust_learning_rate", None)
            model = groups_of(model, kwargs.get("lr"), decay, params, factors)
        made: Optimizer = make(model, **kwargs)
        return made
