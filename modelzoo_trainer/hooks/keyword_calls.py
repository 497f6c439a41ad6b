"""Calls of undeclared events: each listener gets the keyword arguments that it names."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, Final

from modelzoo_trainer.errors import HookError
from modelzoo_trainer.hooks.spec import HookFn

_KEYWORD: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class KeywordCall:
    """A listener's method, called with the arguments that it names.

    Its parameters are inspected once, and the arguments to pass once per form of call. A method
    without an inspectable signature gets all arguments. `title` is class and method, for messages.
    """

    __slots__ = ("_method", "_parameters", "_plans", "takes_trainer", "title")

    def __init__(self, title: str, method: HookFn) -> None:
        self.title = title
        self._method = method
        self._parameters = _parameters_of(method)
        self._plans: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self.takes_trainer = next(iter(self._parameters or ()), "") == "trainer"
        """Whether the first parameter is called `trainer`."""

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Call the method without the keywords that it does not name.

        Raises:
            HookError: If a parameter without a default is not given, one is given twice, or there
                are more positional arguments than parameters.
        """
        form = (len(args), *kwargs)
        plan = self._plans.get(form)
        if plan is None:
            plan = self._plans[form] = self._plan(len(args), tuple(kwargs))
        self._method(*args, **{name: kwargs[name] for name in plan})

    def _plan(self, num: int, keywords: tuple[str, ...]) -> tuple[str, ...]:
        """Return the keywords to pass besides `num` positional arguments."""
        if self._parameters is None:
            return keywords
        parameters = self._parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        in_order = [p.name for p in parameters if p.kind in _POSITIONAL]
        if num > len(in_order) and inspect.Parameter.VAR_POSITIONAL not in kinds:
            raise HookError(
                f"{self.title} takes ({', '.join(self._parameters)}), but the call passes {num} "
                f"positional arguments. Pass them by keyword; each callback then gets only those "
                f"that it takes."
            )
        placed = in_order[:num]
        named = {p.name for p in parameters if p.kind in _KEYWORD}
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        given = tuple(name for name in keywords if takes_all or name in named)
        twice = [name for name in placed if name in given and name in named]
        if twice:
            raise HookError(
                f"{self.title} gets {twice[0]!r} twice: as argument {placed.index(twice[0]) + 1} "
                f"of the call, and by keyword."
            )
        have = {*placed, *(name for name in given if name in named)}
        for parameter in parameters:
            if _is_required(parameter) and parameter.name not in have:
                passed = ", ".join([*placed[self.takes_trainer :], *keywords])
                raise HookError(
                    f"{self.title} requires {parameter.name!r}, but the call passes ({passed})."
                )
        return given


def listener_of(callback: Any, name: str) -> KeywordCall | None:
    """Return the method of an object for an event, or None if it has none of that name.

    One that is not callable is ignored with a warning.
    """
    method = getattr(callback, name, None)
    if method is None:
        return None
    title = f"{owner_name(callback)}.{name}"
    if not callable(method):
        warnings.warn(f"{title} is {method!r}, which is not a method; it is ignored.", stacklevel=2)
        return None
    return KeywordCall(title, method)


def owner_name(callback: Any) -> str:
    """Return the class name of a callback, or of the object that it wraps (`__wrapped__`)."""
    return type(getattr(callback, "__wrapped__", callback)).__name__


def _parameters_of(method: HookFn) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(method).parameters
    except (TypeError, ValueError):  # not written in Python
        return None


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )
