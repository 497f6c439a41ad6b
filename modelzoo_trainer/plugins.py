"""Callbacks that installed packages bring, by an entry point."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from torch.nn import Module

from modelzoo_trainer.errors import HookError

GROUP: Final = "modelzoo_trainer.callbacks_factory"
log = logging.getLogger("modelzoo_trainer.plugins")
_is_on = True


def set_enabled(on: bool) -> None:
    """Switch plug-ins on or off for what is built from now on in this process.

    Args:
        on: Whether they are used; they are until this is called.
    """
    global _is_on  # a switch of the process
    _is_on = on


@contextmanager
def disabled() -> Iterator[None]:
    """Leave plug-ins out of what is built inside."""
    before = _is_on
    set_enabled(False)
    try:
        yield
    finally:
        set_enabled(before)


def plugin_callbacks(checked: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Return the callbacks of all installed plug-ins, ordered by the plug-ins' names.

    A plug-in is a function without arguments that returns none, one or several callbacks, named
    by an entry point of the group `modelzoo_trainer.callbacks_factory`.

    Args:
        checked: Refuses what is no callback, and returns the others.

    Raises:
        HookError: If an entry point is no function, or returns what is no callback. Whatever a
            plug-in raises is passed on, with a note that names it.
    """
    made: list[Any] = []
    for entry in _installed(tuple(sys.path)) if _is_on else ():
        with _named_in_errors(entry):
            own = checked(_as_list(_factory(entry)()))
        if own:
            names = ", ".join(type(callback).__name__ for callback in own)
            log.info("Callbacks of the plug-in %s: %s.", _title(entry), names)
        made += own
    return made


@lru_cache(maxsize=8)
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points; `path` is that of imports, which says what is installed."""
    found = entry_points(group=GROUP)
    return tuple(sorted(found, key=lambda entry: (entry.name, entry.value)))


def _factory(entry: EntryPoint) -> Callable[[], Any]:
    factory: Any = entry.load()
    if not callable(factory):
        raise HookError(f"{entry.value} is {factory!r}. Name a function that returns callbacks.")
    return factory  # type: ignore[no-any-return]  # checked


def _as_list(made: Any) -> list[Any]:
    if made is None:
        return []
    if isinstance(made, tuple) and made and isinstance(made[0], str):
        return [made]  # a function around a method, with its event
    if isinstance(made, Iterable) and not isinstance(made, (str, Mapping, Module)):
        return list(made)
    return [made]


def _title(entry: EntryPoint) -> str:
    package = f" of {entry.dist.name} {entry.dist.version}" if entry.dist else ""
    return f"{entry.name!r} ({entry.value}){package}"


@contextmanager
def _named_in_errors(entry: EntryPoint) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(
            f"raised by the plug-in {_title(entry)}. Uninstall it, or call "
            f"modelzoo_trainer.plugins.set_enabled(False)."
        )
        raise
