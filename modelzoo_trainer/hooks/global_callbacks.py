"""The callbacks and functions of events that every trainer of the process has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol
from weakref import WeakSet

from modelzoo_trainer.interceptors import Pair, is_pair


class Watcher(Protocol):
    """Whoever keeps a table of callbacks and must learn of changes."""

    def rebuild_hooks(self) -> None:
        """Make the table anew."""


_REGISTRY: Final[dict[int, tuple[Any, list[GlobalHandle]]]] = {}
_WATCHERS: Final[WeakSet[Watcher]] = WeakSet()


class GlobalHandle:
    """What takes a global callback back; the callback stays while another handle holds it."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    def remove(self) -> None:
        """Take the callback back; a second call does nothing."""
        _, handles = _REGISTRY.get(id(self._callback), (None, []))
        if self in handles:
            handles.remove(self)
            if not handles:
                del _REGISTRY[id(self._callback)]
                _notify()


def add_global(callback: Any) -> GlobalHandle:
    """Make a callback, or an event and its function, part of every trainer; it was checked.

    Raises:
        ConfigError: If it is a function that does not fit the trainers that there are.
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
    """Return the global callbacks in order of registration, without functions of events."""
    return [callback for callback, _ in _REGISTRY.values() if not is_pair(callback)]


def global_pairs() -> Sequence[Pair]:
    """Return the global functions of events in order of registration."""
    return [callback for callback, _ in _REGISTRY.values() if is_pair(callback)]


def watch_global_callbacks(watcher: Watcher) -> None:
    """Have `watcher` (held weakly) told whenever the set of global callbacks has changed."""
    _WATCHERS.add(watcher)


def _notify() -> None:
    for watcher in tuple(_WATCHERS):
        watcher.rebuild_hooks()
