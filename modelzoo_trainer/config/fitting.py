"""Check and adapt the class or function that a dotted path names, for its place in a file."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from modelzoo_trainer.base.annotations import annotations_of
from modelzoo_trainer.callback import CoreCallback
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.spec import HOOKS
from modelzoo_trainer.optim import OptimizerFactory, ParamFilter
from modelzoo_trainer.optim.functions import function_at, is_of_standard_library
from modelzoo_trainer.optim.scheduler import LR_FACTOR
from modelzoo_trainer.trainer import Trainer


def fitting_callback(target: Any) -> Any:
    """Return a class with hooks.

    Raises:
        ConfigError: If it is not a class, has no hook, or is part of the trainer.
    """
    if not isinstance(target, type):
        raise ConfigError(f"{_described(target)} is not a callback. Name a class with hooks.")
    if issubclass(target, (CoreCallback, Trainer)):
        raise ConfigError(
            f"{target.__name__} is part of the trainer and cannot be added as a callback."
        )
    has_hooks = any(callable(getattr(target, hook, None)) for hook in HOOKS)
    if is_of_standard_library(target) or not has_hooks:
        raise ConfigError(
            f"{target.__name__} is not a callback: it has no hook such as on_fit_start."
        )
    return target


def _is_model(cls: type) -> bool:
    return issubclass(cls, nn.Module)


def _is_optimizer(cls: type) -> bool:
    return issubclass(cls, Optimizer)


def _is_scheduler(cls: type) -> bool:
    return hasattr(cls, "step") and not issubclass(cls, Optimizer)


def _is_processor(cls: type) -> bool:
    return any(hasattr(cls, name) for name in ("create_dataloader", "__iter__", "__getitem__"))


_RULES: dict[str, tuple[Callable[[type], bool], str]] = {
    "model": (_is_model, "it is not a subclass of torch.nn.Module"),
    "optimizer": (_is_optimizer, "it is not a subclass of torch.optim.Optimizer"),
    "scheduler": (_is_scheduler, "it has no step method"),
    "data processor": (
        _is_processor,
        "it has no create_dataloader and is not an iterable of batches",
    ),
}
"""Per kind: the test of a class, and what a class that fails it lacks."""


def fitting(kind: str, target: Any) -> Any:
    """Return a class of a kind, or a function that may return an object of one.

    Raises:
        ConfigError: If it is neither.
    """
    fits, lack = _RULES[kind]
    if isinstance(target, type):
        if is_of_standard_library(target) or not fits(target):
            raise ConfigError(f"{target.__name__} is not {_one(kind)}: {lack}.")
        return target
    function = _plain(target)
    if isinstance(function, type):
        raise ConfigError(
            f"a functools.partial of {function.__name__} is not accepted here. Name the class and "
            f"write its arguments in the file."
        )
    if not isinstance(function, FunctionType) or is_of_standard_library(function):
        raise ConfigError(
            f"{_described(function)} is not accepted here. Name {_one(kind)} class, or a function "
            f"that returns {_one(kind)}."
        )
    results = _results(function)
    if not any(_may_be(result, fits) for result in results):
        shown = " or ".join("None" if one is NoneType else one.__name__ for one in results)
        raise ConfigError(
            f"{function.__name__} is annotated to return {shown}, which is not {_one(kind)}: "
            f"{lack}. Correct the annotation, or name another function."
        )
    return target


def _one(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _plain(target: Any) -> Any:
    """Return the function inside partials, methods and wrappers."""
    while isinstance(target, functools.partial):
        target = target.func
    target = inspect.unwrap(target)
    return target.__func__ if inspect.ismethod(target) else target


def _results(function: FunctionType) -> tuple[Any, ...]:
    """Return what a function may return; a union as its members."""
    try:
        result = get_type_hints(function).get("return", Any)
    except Exception:  # noqa: BLE001  # names that exist for type checkers only
        return (Any,)
    members = get_args(result) if get_origin(result) in (Union, UnionType) else (result,)
    return tuple(get_origin(one) or one for one in members)


def _may_be(result: Any, fits: Callable[[type], bool]) -> bool:
    return result in (Any, object) or not isinstance(result, type) or fits(result)


def _described(target: Any) -> str:
    name = getattr(target, "__name__", repr(target))
    if is_of_standard_library(target):
        return f"{name}, which is part of Python's standard library,"
    return f"{name}, which is {'a function' if inspect.isroutine(target) else 'not a class'},"


_ADDED = {
    "learning_rate": float | None,
    "params": list[ParamFilter] | None,
    "adjust_learning_rate": dict[str, float] | None,
}


def with_groups(cls: Any) -> Any:
    """Return a callable that makes `cls` over the parameter groups of a model.

    `cls`: a subclass of torch's `Optimizer`, or a function, which is returned unchanged.

    Raises:
        ConfigError: If its step needs a closure.
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        return cls
    if issubclass(cls, torch.optim.LBFGS):
        raise ConfigError(
            f"{cls.__name__} is not supported: it requires a closure in each step. Use another "
            f"optimizer, such as AdamW."
        )

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
    """A scheduler of torch without its optimizer, as a member of another scheduler."""

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

    `cls`: a subclass of torch's `LRScheduler`; a custom class with a step method, and a
    function, are returned unchanged.

    Raises:
        ConfigError: If its step needs a metric.
    """
    if not (isinstance(cls, type) and issubclass(cls, LRScheduler)):
        return cls
    if issubclass(cls, ReduceLROnPlateau):
        raise ConfigError(
            f"{cls.__name__} requires a metric at each step, but the trainer calls step() without "
            f"one. Use another scheduler, or remove it from schedulers, and create it and call its "
            f"step(metric) in a custom callback."
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
            f"torch.optim.lr_scheduler.{cls.__name__}.schedulers[{idx}]: {type(member).__name__} "
            f"is not a torch scheduler. Use torch.optim.lr_scheduler.<Name> for each member, or "
            f"{cls.__name__} (without torch.optim.lr_scheduler) with members of this package only."
        )
    return member


def _function(where: str, given: Any) -> Any:
    if isinstance(given, list):
        return [function_at(f"{where}[{idx}]", one) for idx, one in enumerate(given)]
    return function_at(where, given)
