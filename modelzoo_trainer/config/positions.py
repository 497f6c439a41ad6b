"""Values of a file with their positions, and the problems found in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

from modelzoo_trainer.base.annotations import describe as describe_value
from modelzoo_trainer.base.secrets import hide_in_text
from modelzoo_trainer.errors import ConfigError, suggest


@dataclass(frozen=True, slots=True)
class FilePosition:
    """A place in a file, or on the command line."""

    source: str  # the file as the user wrote it, or the option
    line: int = 0  # from 1; 0 = not in a file, as on the command line
    column: int = 0  # from 1

    @property
    def is_option(self) -> bool:
        """Whether it is an option of the command line."""
        return not self.line

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True, slots=True, eq=False)
class Scalar:
    """A single value: None, True, 3, 0.5 or text."""

    value: bool | int | float | str | None
    at: FilePosition
    plain: str = ""
    """As it was written without quotes; "" if it was quoted."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """A list."""

    items: tuple[Node, ...]
    at: FilePosition


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A value of a mapping with the place of its key."""

    key_at: FilePosition
    node: Node


@dataclass(frozen=True, slots=True, eq=False)
class Mapping:
    """A mapping, in the order of the file."""

    entries: dict[Any, Entry]
    at: FilePosition

    def get(self, key: str) -> Node | None:
        """Return the value of `key`, or None if there is no such key."""
        entry = self.entries.get(key)
        return None if entry is None else entry.node


Node: TypeAlias = Scalar | Sequence | Mapping


def is_null(node: Node | None) -> bool:
    """Return whether `node` is missing or null: both mean "not set"."""
    return node is None or (isinstance(node, Scalar) and node.value is None)


def option_in(node: Node) -> FilePosition | None:
    """Return the command-line option that set a key or item inside a value, or None."""
    match node:
        case Mapping():
            parts = [(entry.key_at, entry.node) for entry in node.entries.values()]
        case Sequence():
            parts = [(item.at, item) for item in node.items]
        case Scalar():
            return None
    options = (at if at.is_option else option_in(inner) for at, inner in parts)
    return next(filter(None, options), None)


def to_plain(node: Node, instead: dict[int, Any] | None = None) -> Any:
    """Return dictionaries, lists and values; nothing is shared, whatever the file's aliases.

    `instead`: values in place of scalars' values, by `id`.
    """
    match node:
        case Scalar():
            return (instead or {}).get(id(node), node.value)
        case Sequence():
            return [to_plain(item, instead) for item in node.items]
        case Mapping():
            entries = node.entries.items()
            return {key: to_plain(entry.node, instead) for key, entry in entries}


def from_plain(value: Any, at: FilePosition) -> Node:
    """Return plain values with one position."""
    if isinstance(value, MappingOf):
        return Mapping({key: Entry(at, from_plain(one, at)) for key, one in value.items()}, at)
    if isinstance(value, list | tuple):
        return Sequence(tuple(from_plain(one, at) for one in value), at)
    return Scalar(value, at)


def describe(node: Node) -> str:
    """Return a value as messages show it: `'text'`, `3`, `[1, 2]`, "a mapping"."""
    return "a mapping" if isinstance(node, Mapping) else describe_value(to_plain(node))


@dataclass(frozen=True, slots=True)
class Place:
    """A value and the path to it from the root of the file."""

    node: Node
    path: str  # as messages write it, such as "trainer.init.callbacks[2]"
    key_at: FilePosition  # of its key; of an item of a list, that of the item

    @classmethod
    def root(cls, node: Node) -> Place:
        """Return the place of a whole file."""
        return cls(node, "", node.at)

    @property
    def entry(self) -> Entry:
        """The value with the place of its key."""
        return Entry(self.key_at, self.node)

    def key(self, key: Any) -> Place | None:
        """Return the place of the value of `key`; None if this is not a mapping or lacks it."""
        entry = self.node.entries.get(key) if isinstance(self.node, Mapping) else None
        if entry is None:
            return None
        return Place(entry.node, self.path_of(key), entry.key_at)

    def pairs(self) -> Iterator[tuple[Any, Place]]:
        """Yield the keys of a mapping with their places."""
        if isinstance(self.node, Mapping):
            for key, entry in self.node.entries.items():
                yield key, Place(entry.node, self.path_of(key), entry.key_at)

    def items(self) -> Iterator[Place]:
        """Yield the places of a list's items."""
        if isinstance(self.node, Sequence):
            for idx, item in enumerate(self.node.items):
                yield Place(item, f"{self.path}[{idx}]", item.at)

    def item(self, step: int | str) -> Place | None:
        """Return the place of an item; None if this is not a list or has none at `step`."""
        items = self.node.items if isinstance(self.node, Sequence) else ()
        if not isinstance(step, int) or not 0 <= step < len(items):
            return None
        return Place(items[step], f"{self.path}[{step}]", items[step].at)

    def inside(self, location: tuple[int | str, ...]) -> Place:
        """Return the place at `location`, as pydantic has it.

        `location`: keys and indices; names that are neither (of a union's members) are skipped.
        """
        place = self
        for step in location:
            place = place.key(step) or place.item(step) or place
        return place

    def path_of(self, key: Any) -> str:
        """Return the path of `key` inside this mapping."""
        return f"{self.path}.{key}" if self.path else str(key)


_LONGEST: Final = 300  # characters of a path that are shown
MOST_SHOWN: Final = 100  # problems that are printed
_MOST_ADVISED: Final = 1_000  # problems with suggestions, which take longer to find than problems
_UNSEEN: Final = {
    code: ascii(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
}


class Lack(NamedTuple):
    """What a valid file needs and is not here."""

    kind: str  # a kind of class, "setting", "checkpoint", "device", "secret", or `DATA`
    what: str  # its name; of data, what is missing


DATA: Final = "data"


@dataclass(frozen=True, slots=True)
class Problem:
    """An error or a note about a place."""

    at: FilePosition
    path: str  # of what; empty for the file itself
    message: str  # what is invalid, what was given, what to do
    lack: Lack | None = None  # what is missing, if the file is valid but cannot run here

    def __str__(self) -> str:
        parts = (str(self.at), _shown(self.path), self.message)
        return ": ".join(part for part in parts if part)


def _shown(text: str) -> str:
    """Return a path for a terminal; its keys may be any text."""
    short = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    return short.translate(_UNSEEN)


class Problems:
    """The problems found so far, each once, even if several aliases lead to it.

    `for_a_run`: whether the file is to be run; otherwise, what is valid but cannot run here is a
    note.
    """

    def __init__(self, *, for_a_run: bool = True) -> None:
        self.for_a_run = for_a_run
        self._found: dict[tuple[FilePosition, str], Problem] = {}
        self._noted: dict[tuple[FilePosition, str], Problem] = {}
        self.whole_numbers: dict[int, int] = {}
        """The integers that scalars such as `1e3` and `1_000` stand for, by their `id`."""
        self.hide: Callable[[str], str] = hide_in_text
        """Hides the secrets of the file in messages."""
        self.num_added = 0
        """How often a problem was added; repeated ones are counted each time."""

    def add(self, at: FilePosition, path: str, message: str) -> None:
        """Add a problem; the same one at the same place is kept once."""
        self.num_added += 1
        self._found.setdefault((at, message), Problem(at, path, message))

    def add_to_run(self, at: FilePosition, path: str, message: str, lack: Lack) -> None:
        """Add what is valid but cannot run here: a problem for a run, else a note."""
        if self.for_a_run:
            self.add(at, path, message)
        else:
            message = f"valid, but cannot run here: {message}"
            self._noted.setdefault((at, message), Problem(at, path, message, lack))

    def note(self, at: FilePosition, path: str, message: str) -> None:
        """Add a note, such as a setting that has no effect here."""
        self._noted.setdefault((at, message), Problem(at, path, message))

    def of_one_trainer(self) -> Problems:
        """Return an object with the same problems, and its own notes in addition to these."""
        other = Problems(for_a_run=self.for_a_run)
        other._found = self._found
        other._noted = dict(self._noted)
        other.hide = self.hide
        return other

    def suggest(self, given: str, known: Iterable[str]) -> str:
        """Return a suggestion for an unknown name; "" if there are so many that few are read."""
        return suggest(given, known) if len(self._found) < _MOST_ADVISED else ""

    @property
    def notes(self) -> tuple[Problem, ...]:
        """The notes, by line."""
        noted = _ordered(self._noted)
        return tuple(replace(problem, message=self.hide(problem.message)) for problem in noted)

    def lines(self, most: int | None = None) -> list[str]:
        """Return a line for each problem: in files, by line, then the command line's.

        `most`: how many problems; None = all.
        """
        return [self.hide(str(problem)) for problem in _ordered(self._found)[:most]]

    def raise_if_any(self) -> None:
        """Raise the problems, if there are any.

        Raises:
            ConfigError: If there is a problem; one line each for the first 100, then how many
                more there are.
        """
        lines = self.lines(MOST_SHOWN)
        num_more = len(self._found) - len(lines)
        if num_more > 0:
            lines.append(f"... and {num_more:,} more")
        if lines:
            raise ConfigError("\n".join(lines))


def _ordered(found: dict[tuple[FilePosition, str], Problem]) -> list[Problem]:
    return sorted(found.values(), key=lambda problem: (problem.at.line == 0, problem.at.line))
