"""Optimizers of the user's: with the groups and the aliases of the shipped ones."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from modelzoo_trainer.config.annotations import annotations_of
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import OptimizerFactory, ParamFilter

_ADDED = {
    "learning_rate": float | None,
    "params": list[ParamFilter] | None,
    "adjust_learning_rate": dict[str, float] | None,
}


def with_groups(cls: Any) -> Any:
    """Return a callable that makes `cls` over the parameter groups of a model.

    Args:
        cls: A subclass of torch's `Optimizer`, or a function, which is returned as it is.

    Raises:
        ConfigError: If it is another class, or an optimizer whose step needs a closure.
    """
    if not isinstance(cls, type):
        return cls
    if not issubclass(cls, Optimizer):
        raise ConfigError(
            f"{cls.__name__} is not an optimizer: torch's Optimizer is no base of it."
        )
    if issubclass(cls, torch.optim.LBFGS):
        raise ConfigError(f"{cls.__name__} needs a closure in each step, which the loop has not.")

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
