"""Values of the whole process that several set for a while; the last one's counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Overrides:
    """Sets values of the process, and puts back what was there before.

    Those who set the same value may leave off in any order: it is that of the last of them who is
    still there, and at last what it was.

    Args:
        read: Returns the value of a name.
        write: Sets it.
    """

    def __init__(self, read: Callable[[str], Any], write: Callable[[str, Any], None]) -> None:
        self._read = read
        self._write = write
        self._before: dict[str, Any] = {}
        self._held: dict[str, dict[object, Any]] = {}

    def hold(self, values: Mapping[str, Any]) -> Callable[[], None]:
        """Set values, all or none of them.

        Args:
            values: By name.

        Returns:
            What lets go of them; a second call does nothing.
        """
        token = object()
        done: list[str] = []

        def let_go() -> None:
            while done:
                self._drop(done.pop(), token)

        try:
            for name, value in values.items():
                self._take(name, token, value)
                done.append(name)
        except BaseException:
            let_go()
            raise
        return let_go

    @contextmanager
    def held(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Set values inside.

        Args:
            values: By name.
        """
        let_go = self.hold(values)
        try:
            yield
        finally:
            let_go()

    def _take(self, name: str, token: object, value: Any) -> None:
        before = self._before[name] if name in self._before else self._read(name)
        self._write(name, value)
        self._before[name] = before
        self._held.setdefault(name, {})[token] = value

    def _drop(self, name: str, token: object) -> None:
        held = self._held[name]
        was_last = next(reversed(held)) is token
        del held[token]
        if not held:
            del self._held[name]
            self._write(name, self._before.pop(name))
        elif was_last:
            self._write(name, held[next(reversed(held))])
