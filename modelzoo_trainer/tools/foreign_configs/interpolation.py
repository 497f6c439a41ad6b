"""References `${...}` between the values of a file, as OmegaConf reads them."""

from __future__ import annotations

import re
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError

_REFERENCE: Final = re.compile(r"\$\{([^${}]*)\}")
_PART: Final = re.compile(r"[^.\[\]]+")
_DEPTH: Final = 50  # of references to references


def resolve(root: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return a copy of a file's values without references, and the paths that they name.

    A reference is a path from the root (`${a.b}`, `${a[0]}`), or one that begins with dots and is
    relative to the mapping that contains it (`${.b}`). A value that is nothing else keeps the type
    of what it names; in a longer text it is written out.

    Raises:
        ConfigError: If a reference names nothing, itself or a resolver such as `${oc.env:HOME}`;
            all of them together.
    """
    resolving = _Resolving(root)
    values = resolving.value(root, (), 0)
    if resolving.problems:
        raise ConfigError("\n".join(dict.fromkeys(resolving.problems)))
    return values, resolving.named


class _Resolving:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self.named: set[str] = set()
        self.problems: list[str] = []

    def value(self, value: Any, at: tuple[str, ...], depth: int) -> Any:
        """Return a value without references. `at`: its path."""
        if isinstance(value, dict):
            return {key: self.value(one, (*at, str(key)), depth) for key, one in value.items()}
        if isinstance(value, list):
            return [self.value(one, (*at, str(i)), depth) for i, one in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth > _DEPTH:
            self.problems.append(f"{_dotted(at)}: {value!r} refers to itself.")
            return None
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return self._named(whole[1], at, depth)
        text = _REFERENCE.sub(lambda found: _text(self._named(found[1], at, depth)), value)
        if "${" in text and text != value:  # a reference inside a reference
            return self.value(text, at, depth + 1)
        if "${" in text:
            self.problems.append(f"{_dotted(at)}: {value!r} is not a valid reference.")
        return text

    def _named(self, reference: str, at: tuple[str, ...], depth: int) -> Any:
        if ":" in reference:
            self.problems.append(
                f"{_dotted(at)}: ${{{reference}}} calls a resolver, which a conversion does not "
                f"do. Write the value itself."
            )
            return None
        path = _path(reference.strip(), at)
        found: Any = self._root
        for part in path:
            found = _inside(found, part)
            if found is ...:
                self.problems.append(
                    f"{_dotted(at)}: ${{{reference}}} names nothing in the file. Add "
                    f"{reference.lstrip('.')}, or write the value itself."
                )
                return None
        self.named.add(_dotted(path))
        return self.value(found, path, depth + 1)


def _path(reference: str, at: tuple[str, ...]) -> tuple[str, ...]:
    dots = len(reference) - len(reference.lstrip("."))
    start = at[: max(len(at) - dots, 0)] if dots else ()
    return (*start, *_PART.findall(reference))


def _inside(value: Any, part: str) -> Any:
    if isinstance(value, dict):
        return next((one for key, one in value.items() if str(key) == part), ...)
    if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
        return value[int(part)]
    return ...


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(path)


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_named(path: str, named: set[str]) -> bool:
    """Return whether a reference names a path, or something in it."""
    return any(one == path or one.startswith(f"{path}.") for one in named)
