"""Optimizers of the user's and schedulers of torch's, as components of a file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from modelzoo_trainer.annotations import annotations_of
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import OptimizerFactory, ParamFilter
from modelzoo_trainer.optim.functions import function_at
from modelzoo_trainer.optim.scheduler import LR_FACTOR

_ADDED = {
    "learning_rate": float | None,
    "params": list[ParamFilter] | None,
    "adjust_learning_rate": dict[str, float] | None,
}


def with_groups(cls: Any) -> Any:
    """Return a callable that makes `cls` over the parameter groups of a model.

    `cls`: a subclass of torch's `Optimizer`, or a function, which is returned as it is.

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


_FUNCTIONS: Final[dict[str, Any]] = {"lr_lambda": str | list[str], "scale_fn": str | None}
_ABSOLUTE: Final = ("base_lr", "max_lr")  # rates that torch takes for each group, too


@dataclass(frozen=True, slots=True)
class WithoutOptimizer:
    """A scheduler of torch's that waits for the optimizer: a member of another."""

    cls: type[LRScheduler]
    arguments: Mapping[str, Any]  # all but the optimizer

    def __call__(self, optimizer: Optimizer | None) -> Any:
        """Return the scheduler, or this object if there is no optimizer yet."""
        return self if optimizer is None else _made(self.cls, optimizer, dict(self.arguments))

    def __str__(self) -> str:
        """Return the dotted path of the class."""
        return f"{self.cls.__module__}.{self.cls.__name__}"

    __repr__ = __str__


def with_optimizer(cls: Any) -> Any:
    """Return a callable `(optimizer, ...) -> scheduler` that a file can describe.

    `cls`: a subclass of torch's `LRScheduler`; a class of one's own with a step method, and a
    function, are returned as they are.

    Raises:
        ConfigError: If it is another class, or its step needs a metric.
    """
    if not isinstance(cls, type):
        return cls
    if issubclass(cls, Optimizer) or not hasattr(cls, "step"):
        raise ConfigError(f"{cls.__name__} is not a scheduler: it has no step that sets a rate.")
    if not issubclass(cls, LRScheduler):
        return cls
    if issubclass(cls, ReduceLROnPlateau):
        raise ConfigError(
            f"{cls.__name__} needs a metric at each step, and schedulers are stepped without one. "
            f"Use a schedule of the step, or step it in a callback of yours."
        )

    def make(optimizer: Optimizer | None, **arguments: Any) -> Any:
        return WithoutOptimizer(cls, arguments)(optimizer)

    annotations = annotations_of(cls)
    changed = {name: kind for name, kind in _FUNCTIONS.items() if name in annotations}
    known = inspect.signature(cls).parameters
    first = inspect.Parameter("optimizer", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = [one for name, one in known.items() if name != "optimizer"]
    make.__signature__ = inspect.Signature([first, *rest])  # type: ignore[attr-defined]  # read by `inspect.signature`
    make.__annotations__ = annotations | changed
    make.__name__, make.__module__ = cls.__name__, cls.__module__
    return make


def _made(cls: type[LRScheduler], optimizer: Optimizer, arguments: dict[str, Any]) -> LRScheduler:
    if "schedulers" in arguments:
        arguments["schedulers"] = [
            _member(cls, idx, member, optimizer)
            for idx, member in enumerate(arguments["schedulers"])
        ]
    for name in _FUNCTIONS:
        if name in arguments:
            arguments[name] = _function(f"{cls.__name__}.{name}", arguments[name])
    factors = [group.get(LR_FACTOR, 1.0) for group in optimizer.param_groups]
    for name in _ABSOLUTE:
        given = arguments.get(name)
        if isinstance(given, int | float) and set(factors) != {1.0}:
            arguments[name] = [given * factor for factor in factors]
    return cls(optimizer=optimizer, **arguments)


def _member(cls: type[LRScheduler], idx: int, member: Any, optimizer: Optimizer) -> Any:
    if isinstance(member, WithoutOptimizer):
        return member(optimizer)
    if not isinstance(member, LRScheduler):
        raise ConfigError(
            f"{cls.__name__}.schedulers[{idx}]: {type(member).__name__} is not one of torch's, "
            f"and torch's {cls.__name__} takes no others. Write torch.optim.lr_scheduler.<Name>, "
            f"or use {cls.__name__} without a module."
        )
    return member


def _function(where: str, given: Any) -> Any:
    if isinstance(given, list):
        return [function_at(f"{where}[{idx}]", one) for idx, one in enumerate(given)]
    return function_at(where, given)
