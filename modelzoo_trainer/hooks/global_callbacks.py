"""Callbacks and interceptors that every trainer of the process has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol
from weakref import WeakSet

from modelzoo_trainer.hooks.interceptors import Pair, is_pair


class Watcher(Protocol):
    """An object that must be notified when the global callbacks change."""

    def rebuild_hooks(self) -> None:
        """Rebuild the hook table."""


_REGISTRY: Final[dict[int, tuple[Any, list[GlobalHandle]]]] = {}
_WATCHERS: Final[WeakSet[Watcher]] = WeakSet()


class GlobalHandle:
    """Handle that removes a global callback; the callback stays while another handle holds it."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    def remove(self) -> None:
        """Remove the callback. Idempotent."""
        _, handles = _REGISTRY.get(id(self._callback), (None, []))
        if self in handles:
            handles.remove(self)
            if not handles:
                del _REGISTRY[id(self._callback)]
                _notify()


def add_global(callback: Any) -> GlobalHandle:
    """Add a validated callback, or an event and its function, to every trainer.

    Raises:
        ConfigError: If a function does not fit an existing trainer.
    """
    handle = GlobalHandle(callback)
    _REGISTRY.setdefault(id(callback), (callback, []))[1].append(handle)
    try:
        _notify()
    except BaseException:
        handle.remove()
        raise
    return handle


def global_callbacks() -> Sequence[Any]:
    """Return the global callbacks in order of registration, without interceptors."""
    return [callback for callback, _ in _REGISTRY.values() if not is_pair(callback)]


def global_pairs() -> Sequence[Pair]:
    """Return the global interceptors in order of registration."""
    return [callback for callback, _ in _REGISTRY.values() if is_pair(callback)]


def watch_global_callbacks(watcher: Watcher) -> None:
    """Notify `watcher` (held weakly) whenever the set of global callbacks changes."""
    _WATCHERS.add(watcher)


def _notify() -> None:
    for watcher in tuple(_WATCHERS):
        watcher.rebuild_hooks()
