"""Mistakes put into the text of a configuration, one at a time, and what the check should say."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.config.parts import parts_of, plain
from tests.config.shapes import Format, Held, fits

GIVEN_TWICE = "given twice"
MISSING = "missing"
MISSPELT = "misspelt"
WRONG = ("text", "mapping", "scalar")  # in the place of a value of another type
GROUPS = ".adjust_learning_rate"  # its keys are groups of a model's parameters
KINDS = (MISSPELT, *WRONG, MISSING, GIVEN_TWICE)

_INSTEAD = {"text": "wrong_type", "mapping": "{wrong: type}", "scalar": "7"}
_INSTEAD_PLAIN: dict[str, Any] = {"text": "wrong_type", "mapping": {"wrong": "type"}, "scalar": 7}


@dataclass(frozen=True)
class Mutant:
    """A file with one mistake.

    Args:
        kind: One of `KINDS`.
        way: Of misspelling; else empty.
        path: Of the key, in the file as it was.
        owner: Whose key it is: a class, or a section of the format.
        is_shipped: Whether the owner is part of this package, or of the format itself.
        is_open: Whether the format lets it pass: there, nothing can be found.
        text: The file with the mistake.
        line: Where a problem should be reported.
        word: What it should name.
        key: As it was.
        moved: Lines from the first on stand so many lines further down than in the file as it was.
    """

    kind: str
    way: str
    path: str
    owner: str
    is_shipped: bool
    is_open: bool
    text: str
    line: int
    word: str
    key: str
    moved: tuple[int, int]


def misspellings(key: str) -> dict[str, str]:
    """Return realistic ways to misspell `key`, always the same ones for it."""
    number = zlib.crc32(key.encode())
    where = number % len(key)
    ways = {"letter too many": key[: where + 1] + key[where] + key[where + 1 :]}
    ways["letter appended"] = key + "sxe_"[number % 4]
    if len(key) > 1:
        ways["letter dropped"] = key[:where] + key[where + 1 :]
    pairs = [i for i in range(len(key) - 1) if key[i].lower() != key[i + 1].lower()]
    if pairs:
        i = pairs[number % len(pairs)]
        ways["letters swapped"] = key[:i] + key[i + 1] + key[i] + key[i + 2 :]
    if "_" in key:
        ways["dash"] = key.replace("_", "-")
    return ways


def mutants_of(text: str, form: Format, *, all_ways: bool = False) -> Iterator[Mutant]:
    """Yield every mistake that `KINDS` names, at every key of a file.

    Args:
        text: The file.
        form: Says what is open and what is required.
        all_ways: Whether to misspell each key in every way, instead of one that its path decides.
    """
    root, anchored = parts_of(text)
    for held in form.walk(root, anchored):
        yield from _Mistakes(text, held, all_ways).all()


def keys_of(text: str, form: Format) -> list[Held]:
    """Return the keys of a file, each once, however many aliases lead to it."""
    root, anchored = parts_of(text)
    return list(form.walk(root, anchored))


class _Mistakes:
    """All that is done to one key."""

    def __init__(self, text: str, held: Held, all_ways: bool) -> None:
        self.text = text
        self.all_ways = all_ways
        self.held = held
        self.key, self.value = held.key, held.value

    def all(self) -> Iterator[Mutant]:
        yield from self._misspelt()
        yield from self._wrong()
        yield from self._missing()
        yield self._given_twice()

    def _misspelt(self) -> Iterator[Mutant]:
        others = {key.value.lower() for key, _ in self.held.holder.pairs if key is not self.key}
        others |= {known.lower() for known in self.held.known}
        ways = misspellings(self.key.value).items()
        ways = [(way, word) for way, word in ways if word.lower() not in others]
        if not self.all_ways:
            ways = [ways[zlib.crc32(self.held.path.encode()) % len(ways)]]
        for way, word in ways:
            text = self._replaced(self.key.start, self.key.end, word)
            yield self._mutant(
                MISSPELT, text, word=word, way=way, is_open=self._is_open_to(key=word)
            )

    def _wrong(self) -> Iterator[Mutant]:
        """Yield values of another type; the anchor of a value stays where it is."""
        if self._anchors_inside(own=False):
            return
        is_scalar = self.value.kind == "scalar"
        kinds = ["mapping"] if is_scalar else ["scalar"]
        if is_scalar and isinstance(self.value.plain(), bool | int | float):
            kinds.insert(0, "text")
        for kind in kinds:
            anchor = f"&{self.value.anchor} " if self.value.anchor else ""
            instead = f" {anchor}{_INSTEAD[kind]}"
            colon = self.text.index(":", self.key.end) + 1
            text = self._replaced(colon, self.value.end, instead)
            moved = -self.text.count("\n", colon, self.value.end)
            is_open = self._is_open_to(value=_INSTEAD_PLAIN[kind])
            yield self._mutant(kind, text, moved=moved, is_open=is_open)

    def _missing(self) -> Iterator[Mutant]:
        if not self.held.is_required or self._anchors_inside(own=True):
            return
        pairs = self.held.holder.pairs
        idx = next(i for i, (key, _) in enumerate(pairs) if key is self.key)
        instead = ""
        if idx + 1 < len(pairs):
            start, end = self.key.start, pairs[idx + 1][0].start
        elif idx > 0:
            start, end = pairs[idx - 1][1].end, self.value.end
        else:
            start, end = self.key.start, self.value.end
            instead = "" if self.held.holder.is_flow else "{}"
        text = self._replaced(start, end, instead)
        moved = -self.text.count("\n", start, end)
        yield self._mutant(MISSING, text, line=self.held.holder_line, moved=moved, is_open=False)

    def _given_twice(self) -> Mutant:
        start = self.key.start
        column = start - (self.text.rfind("\n", 0, start) + 1)
        gap, moved = (", ", 0) if self.held.holder.is_flow else ("\n" + " " * column, 1)
        text = self._replaced(start, start, f"{self.key.value}: 0{gap}")
        line = self.key.line + moved
        return self._mutant(GIVEN_TWICE, text, line=line, moved=moved, is_open=False)

    def _mutant(
        self,
        kind: str,
        text: str,
        *,
        is_open: bool,
        word: str | None = None,
        way: str = "",
        line: int | None = None,
        moved: int = 0,
    ) -> Mutant:
        held = self.held
        return Mutant(
            kind=kind,
            way=way,
            path=held.path,
            owner=held.owner,
            is_shipped=held.is_shipped,
            is_open=is_open,
            text=text,
            line=self.key.line if line is None else line,
            word=self.key.value if word is None else word,
            key=self.key.value,
            moved=(self.key.line + 1, moved) if kind != GIVEN_TWICE else (self.key.line, moved),
        )

    def _is_open_to(self, **change: Any) -> bool:
        """Return whether the format would take the key, or the value, in the place of this one."""
        held = self.held
        if held.is_unknown or held.argument is None:
            return held.is_unknown or (held.is_open and "key" in change)
        parameter, whole = held.argument
        if self.value is whole and "key" in change:
            return held.is_open
        if held.is_shipped and not held.owner.endswith(GROUPS):
            return False  # the class itself checks what its annotations let pass
        if self.value is whole:
            return fits(parameter, change["value"])
        return fits(parameter, plain(whole, held.anchored, self.key, change))

    def _anchors_inside(self, *, own: bool) -> bool:
        """Return whether an anchor that an alias needs would be lost."""
        inside = self.value.inside() if self.value.kind != "alias" else iter(())
        return any(part.anchor for part in inside if own or part is not self.value)

    def _replaced(self, start: int, end: int, by: str) -> str:
        return self.text[:start] + by + self.text[end:]
