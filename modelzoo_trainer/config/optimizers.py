"""Optimizers of the user's: with the groups and the aliases of the shipped ones."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.optim import Optimizer

from modelzoo_trainer.config.annotations import annotations_of
from modelzoo_trainer.optim import OptimizerFactory, ParamFilter

_ADDED = {
    "learning_rate": float | None,
    "params": list[ParamFilter] | None,
    "adjust_learning_rate": dict[str, float] | None,
}


def with_groups(cls: Any) -> Any:
    """Return a callable that makes `cls` over the parameter groups of a model.

    Args:
        cls: A subclass of torch's `Optimizer`; anything else is returned as it is.
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        return cls

    def make(model: nn.Module, **arguments: Any) -> Optimizer:
        return OptimizerFactory(cls, arguments)(model)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _ADDED
    ]
    first, *others = inspect.signature(cls).parameters.values()
    own = [one for one in others if one.name not in _ADDED and one.kind is not one.VAR_KEYWORD]
    rest = [one for one in others if one.kind is one.VAR_KEYWORD]
    model = first.replace(name="model")
    make.__signature__ = inspect.Signature([model, *own, *added, *rest])  # type: ignore[attr-defined]  # read by `inspect.signature`
    make.__annotations__ = annotations_of(cls) | _ADDED
    make.__name__, make.__module__ = cls.__name__, cls.__module__
    return make
