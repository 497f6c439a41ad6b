"""The arguments that a component was constructed with, for the record of a run."""

from __future__ import annotations

import functools
import inspect
from numbers import Integral, Real
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

import torch

_KEY: Final = "_constructor_arguments"
_MOST_ITEMS: Final = 100  # of a collection
_LONGEST: Final = 1000  # characters of a text
_TEXTS: Final = (str, Path, torch.device, torch.dtype)
_NAMED: Final = (type, FunctionType, BuiltinFunctionType, MethodType)


def keep_arguments(cls: type) -> None:
    """Make the constructor of a class keep its arguments, for `arguments_of`."""
    init: Any = vars(cls)["__init__"]
    parameters = list(inspect.signature(init).parameters.values())[1:]
    defaults = {
        one.name: one.default
        for one in parameters
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }

    @functools.wraps(init)
    def keeping(self: Any, *args: Any, **kwargs: Any) -> None:
        if _KEY not in vars(self):  # else called by the constructor of a subclass
            given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
            vars(self)[_KEY] = {name: _safely_plain(value) for name, value in given.items()}
        init(self, *args, **kwargs)

    cls.__init__ = keeping  # type: ignore[misc]  # same signature


def arguments_of(part: object) -> dict[str, Any]:
    """Return the arguments as plain values, with defaults; empty if they were not kept.

    The arguments of a dataclass are its attributes. If a subclass's own constructor does not keep
    its arguments, the base class's.
    """
    kept: dict[str, Any] = getattr(part, "__dict__", {}).get(_KEY, {})
    known = getattr(part, "__dataclass_fields__", {}) if not kept else {}
    own = {name: getattr(part, name, None) for name, one in known.items() if one.init}
    return kept | {name: _safely_plain(value) for name, value in own.items()}


def _safely_plain(value: Any) -> Any:
    try:
        return plain(value)
    except Exception:  # noqa: BLE001  # a value without a text is for the constructor to judge
        return type(value).__name__


def plain(value: Any) -> Any:
    """Return a value that JSON can have; of functions and other objects the name.

    Long texts are cut, and large collections counted.
    """
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, dict | list | tuple | set | frozenset):
        return _plain_items(value) if len(value) <= _MOST_ITEMS else f"{len(value)} items"
    if isinstance(value, _TEXTS):
        return str(value)[:_LONGEST]
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return value.__qualname__ if isinstance(value, _NAMED) else type(value).__name__


def _plain_items(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    items = [plain(one) for one in value]
    return sorted(items, key=str) if isinstance(value, set | frozenset) else items
