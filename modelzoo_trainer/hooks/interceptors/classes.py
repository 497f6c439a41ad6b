"""The events of a class, and the interceptors it defines."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypeVar

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.interceptors.functions import (
    CALLED,
    INIT,
    AnyFunction,
    Pair,
    canonical,
    note_call,
)

F = TypeVar("F", bound=AnyFunction)

OWN_LIST: Final = "_interceptor_list"
"""Attribute for the list `callbacks` that a class was defined with."""

_NAME: Final = re.compile(r"[a-z0-9]+([-_][a-z0-9]+)*")
_STYLE: Final = re.compile(r"(pre|post)_(.+)_callback")


def event(*names: str, keeps_result: bool = False, passes_result: bool = True) -> Callable[[F], F]:
    """Mark a method as an event.

    Args:
        names: Event names; more than one are synonyms.
        keeps_result: Whether a post-function must not replace a result by None, although the method
            itself may return None.
        passes_result: Whether post-functions get the result and may replace it. If False they take
            (self) alone, as for a method that returns nothing.

    Returns:
        A decorator that returns the method itself. Overrides of it need not be marked.

    Raises:
        ConfigError: If a name does not consist of letters, digits and hyphens, or is the name of
            the constructor; or if the method is not a plain one.
    """
    for name in names:
        if not _NAME.fullmatch(name) or name == INIT:
            raise ConfigError(
                f"event({name!r}): event names are lower case, with hyphens, such as "
                f"'create-model'; {INIT!r} is reserved for the constructor."
            )

    def mark(method: F) -> F:
        is_plain = inspect.isfunction(method) and not inspect.iscoroutinefunction(method)
        if not names or not is_plain:
            raise ConfigError(
                f"event{names}: @event requires a name and must decorate a plain method, as in "
                f"@event('my-event'). Got {method!r}."
            )
        method.__events__ = tuple(map(canonical, names))  # type: ignore[attr-defined]  # the mark
        method.__keeps_result__ = keeps_result  # type: ignore[attr-defined]  # part of it
        method.__passes_result__ = passes_result  # type: ignore[attr-defined]  # likewise
        return method

    return mark


def events_of(cls: type) -> dict[str, str]:
    """Return the events of a class and its bases, with the names of their methods.

    Raises:
        ConfigError: If an event has two methods, or two classes give a method different events.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        for attribute, method in vars(base).items():
            marked: tuple[str, ...] = getattr(method, "__events__", ())
            before = [name for name, known in found.items() if known == attribute]
            for name in marked:
                marking = f"{base.__name__}.{attribute} is marked as event {name!r}, but"
                if found.get(name, attribute) != attribute:
                    raise ConfigError(
                        f"{marking} the method {found[name]} is already marked as this event. Use "
                        f"another event name."
                    )
                if before and name not in before:
                    raise ConfigError(
                        f"{marking} it overrides the method of event {before[0]!r}. Remove the "
                        f"mark: a method that overrides another keeps its event."
                    )
            found |= dict.fromkeys(marked, attribute)
    return found


def take_list(cls: type) -> None:
    """Store the list `callbacks` of a class, and mark its interceptor methods."""
    given = vars(cls).get("callbacks")
    if isinstance(given, (list, tuple)):
        setattr(cls, OWN_LIST, tuple(given))
        delattr(cls, "callbacks")
    for name, value in list(vars(cls).items()):
        if _STYLE.fullmatch(name) and inspect.isfunction(value):
            setattr(cls, name, once_a_chain(value))


def once_a_chain(function: AnyFunction) -> AnyFunction:
    """Return an interceptor method that runs at most once per call of the event.

    So a call of the parent class's interceptor, which was called already, has no side effects.
    """
    chained = object()
    signature = inspect.signature(function)

    @wraps(function)
    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        if (id(self), chained) not in CALLED.get():
            return function(self, *args, **kwargs)
        given = list(signature.bind(self, *args, **kwargs).arguments.values())[1:]
        return given[0] if len(given) == 1 else tuple(given) or None

    call.__chained__ = chained  # type: ignore[attr-defined]  # read by Function
    return call


def class_pairs(cls: type) -> tuple[Pair, ...]:
    """Return the interceptors of a class and its bases: base first, without duplicates."""
    found: list[Pair] = []
    for base in reversed(cls.__mro__):
        given = vars(base).get(OWN_LIST)
        if given is None:
            given = vars(base).get("callbacks", ())  # of a mixin that is not such a class itself
        inherited = list(found)
        if isinstance(given, (list, tuple)):
            found += [pair for pair in given if pair not in inherited]
        found += _methods_of(base)
    return tuple(found)


def pair_of(owner: object, pair: Pair) -> Pair:
    """Bind an interceptor of an object's class to another object that has its event.

    A method of the class gets the object that it belongs to, not the other one.
    """
    event, function = pair
    methods = (method for base in type(owner).__mro__ for _, method in _methods_of(base))
    if not any(function is method for method in methods):
        return event, function

    @wraps(function)
    def call(other: object, *args: Any, **kwargs: Any) -> Any:
        result = function(owner, *args, **kwargs)
        note_call(owner, getattr(function, "__chained__", None))
        return result

    return event, call


def _methods_of(cls: type) -> list[Pair]:
    pairs: list[Pair] = []
    for name, value in vars(cls).items():
        match = _STYLE.fullmatch(name)
        if match is None:
            continue
        if not inspect.isfunction(value):
            raise ConfigError(
                f"{cls.__name__}.{name} is {value!r}; it must be a method: def {name}(self, ...)."
            )
        pairs.append((f"{match[1]}-{canonical(match[2])}", value))
    return pairs
