"""What a conversion lists: keys without counterpart, with a difference, without effect."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from modelzoo_trainer.base.annotations import describe
from modelzoo_trainer.base.secrets import hide_in_text, without_secrets
from modelzoo_trainer.errors import ConfigError

_WIDTH: Final = 96
_LONGEST: Final = 60  # characters of a value


class FindingKind(Enum):
    """Why a key is listed; the values are headings, in their order."""

    MISSING = "Not converted: needs a number that the file does not have"
    ABSENT = "No counterpart, left out"
    UNKNOWN = "Unknown key, left out"
    DIFFERENT = "Converted, with a difference"
    NO_EFFECT = "No effect here"


@dataclass(frozen=True, slots=True)
class Finding:
    """A key of the converted file, and what to know about it."""

    kind: FindingKind
    path: str
    value: str
    """As it is shown; "" for a default that the file does not write."""
    why: str

    def __str__(self) -> str:
        return f"{self.path}{f' = {self.value}' if self.value else ''}: {self.why}"


class Findings:
    """The findings and the mistakes of one file."""

    def __init__(self) -> None:
        self._all: list[Finding] = []
        self._mistakes: list[str] = []

    def add(self, kind: FindingKind, path: str, value: Any, why: str) -> None:
        """Add a finding.

        `value`: as in the file; `...` = the file does not have the key.
        """
        shown = "" if value is ... else _shown(path, value)
        finding = Finding(kind, path, shown, why)
        if finding not in self._all:
            self._all.append(finding)

    def mistake(self, text: str) -> None:
        """Add a mistake; it ends the conversion in `raise_mistakes`."""
        self._mistakes.append(text)

    def raise_mistakes(self) -> None:
        """Raise what `mistake` has collected.

        Raises:
            ConfigError: If there is a mistake; all of them together.
        """
        if self._mistakes:
            raise ConfigError("\n".join(dict.fromkeys(self._mistakes)))

    @property
    def is_complete(self) -> bool:
        """Whether the result does what the file said, up to keys without effect."""
        return all(finding.kind is FindingKind.NO_EFFECT for finding in self._all)

    def of(self, kind: FindingKind) -> list[Finding]:
        """Return the findings of a kind, in the order of the file."""
        return [finding for finding in self._all if finding.kind is kind]

    def lines(self) -> Iterator[str]:
        """Yield the list as lines of text."""
        for kind in FindingKind:
            found = self.of(kind)
            if found:
                yield f"{kind.value}:"
            for finding in found:
                yield from textwrap.wrap(
                    str(finding),
                    _WIDTH,
                    initial_indent="  ",
                    subsequent_indent="      ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )


def _shown(path: str, value: Any) -> str:
    key = path.rpartition(".")[2]
    left = without_secrets({key: value})
    text = hide_in_text(_flat(left[key])) if key in left else "***"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flat(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flat, value)) + "]"
    return value if isinstance(value, str) else describe(value)
