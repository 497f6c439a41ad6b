"""What a dotted path may lead to at its place in a file, checked before anything is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import nn
from torch.optim import Optimizer

from modelzoo_trainer.callback import CoreCallback
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.spec import HOOKS
from modelzoo_trainer.optim.functions import is_of_standard_library
from modelzoo_trainer.trainer import Trainer


def fitting_callback(target: Any) -> Any:
    """Return a class with hooks.

    Raises:
        ConfigError: If it is no class, has no hook, or is a part of the trainer.
    """
    if not isinstance(target, type):
        raise ConfigError(f"{_described(target)} is not a callback. Name a class with hooks.")
    if issubclass(target, (CoreCallback, Trainer)):
        raise ConfigError(f"{target.__name__} is a part of the trainer, no callback to be added.")
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
    "model": (_is_model, "torch.nn.Module is no base of it"),
    "optimizer": (_is_optimizer, "torch's Optimizer is no base of it"),
    "scheduler": (_is_scheduler, "it has no step that sets a rate"),
    "data processor": (
        _is_processor,
        "it has no create_dataloader, and is no iterable of batches",
    ),
}
"""What a class of each kind is, and what one that is not lacks."""


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
            f"a functools.partial of {function.__name__} is not for this place. Name the class, "
            f"and write its arguments in the file."
        )
    if not isinstance(function, FunctionType) or is_of_standard_library(function):
        raise ConfigError(
            f"{_described(function)} is not for this place. Name the class of the {kind}, or a "
            f"function of your own that returns one."
        )
    if not any(_may_be(result, fits) for result in _results(function)):
        raise ConfigError(
            f"{function.__name__} does not return {_one(kind)}, as its annotation says: {lack}."
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
        return f"{name}, which is of Python's standard library,"
    return f"{name}, which is {'a function' if inspect.isroutine(target) else 'no class'},"
