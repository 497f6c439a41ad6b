"""Callbacks of installed packages, by an entry point."""

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
    """Enable or disable plugins for what is created from now on in this process.

    Args:
        on: Whether to use them; the default is True.
    """
    global _is_on  # process-wide
    _is_on = on


@contextmanager
def disabled() -> Iterator[None]:
    """Ignore plugins in what is created inside."""
    before = _is_on
    set_enabled(False)
    try:
        yield
    finally:
        set_enabled(before)


def plugin_callbacks(checked: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Return the callbacks of all installed plugins, ordered by plugin name.

    A plugin is a function without arguments that returns zero or more callbacks, given by an entry
    point of the group `modelzoo_trainer.callbacks_factory`.

    Args:
        checked: Validates and returns a list of callbacks.

    Raises:
        HookError: If an entry point is not a function, or returns something else. Exceptions of a
            plugin propagate, with a note that names it.
    """
    made: list[Any] = []
    for entry in _installed(tuple(sys.path)) if _is_on else ():
        with _named_in_errors(entry):
            own = checked(_as_list(_factory(entry)()))
        if own:
            names = ", ".join(type(callback).__name__ for callback in own)
            log.info("Callbacks of plugin %s: %s.", _title(entry), names)
        made += own
    return made


@lru_cache(maxsize=8)
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points; `path` is `sys.path`, which determines what is installed."""
    found = entry_points(group=GROUP)
    return tuple(sorted(found, key=lambda entry: (entry.name, entry.value)))


def _factory(entry: EntryPoint) -> Callable[[], Any]:
    factory: Any = entry.load()
    if not callable(factory):
        raise HookError(
            f"{entry.value} is {factory!r}. It must be a function that returns callbacks."
        )
    return factory  # type: ignore[no-any-return]  # checked


def _as_list(made: Any) -> list[Any]:
    if made is None:
        return []
    if isinstance(made, tuple) and made and isinstance(made[0], str):
        return [made]  # an event and its function
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
            f"raised by plugin {_title(entry)}. Uninstall it, or call "
            f"modelzoo_trainer.hooks.plugins.set_enabled(False)."
        )
        raise
