"""What a class says about itself: its first line, and the lines of its arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, Final

_IN_YAML: Final = {"None": "null", "True": "true", "False": "false"}
_ENTRY: Final = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \(.*?\))?:(?: (.*))?")


def summary(target: Any) -> str:
    """Return the first line of the docstring; empty if there is none.

    Args:
        target: A class or a function.
    """
    return next((text.splitlines()[0] for text in _docstrings(target)), "")


def argument_texts(target: Any) -> dict[str, str]:
    """Return what the section `Args:` says, by argument.

    Args:
        target: A class or a function. What a class leaves out is taken from its bases of the same
            package; another package's may have other defaults, and are not asked.
    """
    found: dict[str, str] = {}
    for docstring in _docstrings(target):
        for name, text in _entries(docstring):
            found.setdefault(name, text)
    return found


def _docstrings(target: Any) -> Iterator[str]:
    package = _package(target)
    for owner in inspect.getmro(target) if isinstance(target, type) else (target,):
        text = vars(owner).get("__doc__") if isinstance(owner, type) else owner.__doc__
        if not isinstance(text, str) or not text.strip() or _package(owner) != package:
            continue
        if not text.startswith(f"{owner.__name__}("):  # else a dataclass wrote it: its signature
            yield re.sub(r"\b(None|True|False)\b", _in_yaml, inspect.cleandoc(text))


def _in_yaml(word: re.Match[str]) -> str:
    return _IN_YAML[word[0]]


def _package(target: Any) -> str:
    return str(target.__module__).partition(".")[0]


def _entries(docstring: str) -> Iterator[tuple[str, str]]:
    names: list[str] = []
    words: list[str] = []
    is_inside = False
    for line in [*docstring.splitlines(), "end"]:
        entry = _ENTRY.fullmatch(line) if is_inside else None
        if entry or (line and not line.startswith(" ")):
            yield from ((name, " ".join(words)) for name in names if words)
            names, words = [], []
            is_inside = is_inside if entry else line == "Args:"
        if entry:
            names = [name.lstrip("*") for name in entry[1].split(", ")]
            words = [entry[2]] if entry[2] else []
        elif is_inside and line.startswith("     "):
            words.append(line.strip())
