"""Read the sections of a foreign file so that no key is forgotten."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelzoo_trainer.base.annotations import describe
from modelzoo_trainer.errors import suggest
from modelzoo_trainer.tools.foreign_configs.findings import FindingKind, Findings
from modelzoo_trainer.tools.foreign_configs.interpolation import is_named


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A key of a foreign file.

    Attributes:
        kind: None = it is converted.
        text: The counterpart, or why there is none and what to do instead.
        neutral: Values that say what is so here anyway.
    """

    kind: FindingKind | None
    text: str
    neutral: tuple[Any, ...] = ()


Keys = Mapping[str, ForeignKey]
"""Keys by their paths; `*` in a path is any one name."""


def moved(here: str) -> ForeignKey:
    """Return a key that is converted. `here`: its counterpart."""
    return ForeignKey(None, here)


def no_effect(why: str) -> ForeignKey:
    """Return a key that changes nothing here."""
    return ForeignKey(FindingKind.NO_EFFECT, why)


def absent(why: str, *neutral: Any) -> ForeignKey:
    """Return a key without counterpart. `why`: and what to do instead."""
    return ForeignKey(FindingKind.ABSENT, why, neutral)


class Section:
    """A mapping of a foreign file. Every key is read, or listed by `list_rest`.

    Args:
        values: The mapping.
        path: Where it is in the file; "" = the file itself.
        name: Its path in `keys`, as there is one for several alike.
        keys: All keys that are known.
        findings: Receives the keys that are not converted.
    """

    def __init__(
        self, values: dict[Any, Any], path: str, name: str, keys: Keys, findings: Findings
    ) -> None:
        self.path = path
        self.findings = findings
        self._values = values
        self._name = name
        self._keys = keys
        self._read: set[Any] = set()
        self._inner: dict[str, Section] = {}

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def __iter__(self) -> Any:
        return iter(self._values)

    def where(self, key: str) -> str:
        """Return the path of a key in the file."""
        return f"{self.path}.{key}" if self.path else key

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, which is then converted; `default` if it is null or absent."""
        if self._key(key) is None:
            raise LookupError(f"{self._name}: {key} is not in the table of keys")
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def text(self, key: str, default: str | None = None) -> Any:
        """Return a text."""
        value = self.take(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        return self._checked(key, value, str, "text", default)

    def flag(self, key: str, default: bool | None = None) -> Any:
        """Return a boolean."""
        return self._checked(key, self.take(key, default), bool, "true or false", default)

    def integer(self, key: str, default: int | None = None) -> Any:
        """Return an integer."""
        value = self.take(key, default)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return self._checked(key, value, int, "an integer", default)

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number."""
        return self._checked(key, self.take(key, default), (int, float), "a number", default)

    def betas(self, key: str, default: list[float]) -> Any:
        """Return a list of two numbers."""
        value = self.take(key, default)
        is_pair = isinstance(value, list) and len(value) == len(default)
        if is_pair and all(type(one) in (int, float) for one in value):
            return value
        self._wrong(key, value, "a list of two numbers")
        return default

    def inside(self, key: str, name: str | None = None) -> Section:
        """Return the mapping at a key; empty if it is null or absent."""
        return self._section(self.take(key, {}), self.where(key), name or self._path(key))

    def each(self, key: str, name: str | None = None) -> list[Section]:
        """Return the mappings in the list at a key; one mapping is a list of it."""
        value, name = self.take(key, []), name or self._path(key)
        if not isinstance(value, list):
            return [self._section(value, self.where(key), name)]
        where = self.where(key)
        return [self._section(one, f"{where}[{i}]", name) for i, one in enumerate(value)]

    def note(self, kind: FindingKind, key: str, why: str) -> None:
        """List a key. A null or absent one is shown without a value."""
        value = self._values.get(key, ...)
        self.findings.add(kind, self.where(key), ... if value is None else value, why)

    def differs(self, key: str, why: str) -> None:
        """List a key as converted with a difference."""
        self.note(FindingKind.DIFFERENT, key, why)

    def left_out(self, key: str, why: str) -> None:
        """List a key as left out; it counts as read."""
        self.take(key)
        self.note(FindingKind.ABSENT, key, why)

    def drop(self, key: Any) -> Any:
        """Return the value of a key that has no place in the table; it counts as read."""
        self._read.add(key)
        return self._values[key]

    def drop_named(self, named: set[str], known: Keys) -> None:
        """Take the keys that only references use, as files of older versions have them.

        Args:
            named: The paths that references name.
            known: Keys that are converted nevertheless.
        """
        for key in self:
            if is_named(str(key), named) and str(key) not in known:
                why = "its value was inserted where the file refers to it."
                self.findings.add(FindingKind.NO_EFFECT, str(key), self.drop(key), why)

    def rest(self) -> dict[Any, Any]:
        """Return the keys that were not read, which count as read now."""
        left = {key: one for key, one in self._values.items() if key not in self._read}
        self._read |= set(left)
        return left

    def list_rest(self) -> None:
        """List every key that was not read, here and in the inner sections."""
        for key, value in self._values.items():
            if key not in self._read:
                self._list_unread(str(key), value)
        for section in self._inner.values():
            section.list_rest()

    def _list_unread(self, key: str, value: Any) -> None:
        known = self._key(key)
        if known is None:
            advice = suggest(key, [name.rpartition(".")[2] for name in self._siblings()])
            advice = advice if advice.startswith("Did you mean") else ""
            why = f"no such key is known in {self.path or 'the file'}. {advice}".rstrip()
            self.findings.add(FindingKind.UNKNOWN, self.where(key), value, why)
        elif value is not None:
            kind = known.kind or FindingKind.NO_EFFECT
            why = known.text if known.kind else "no effect in this combination of settings."
            if kind is FindingKind.ABSENT and _is_one_of(value, known.neutral):
                kind, why = FindingKind.NO_EFFECT, "it is so here anyway."
            self.findings.add(kind, self.where(key), value, why)

    def _section(self, value: Any, path: str, name: str) -> Section:
        if path in self._inner:
            return self._inner[path]
        if not isinstance(value, dict):
            self.findings.mistake(f"{path}: expected a mapping, got {describe(value)}.")
            value = {}
        section = Section(value, path, name, self._keys, self.findings)
        self._inner[path] = section
        return section

    def _path(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key

    def _key(self, key: str) -> ForeignKey | None:
        any_name = f"{self._name}.*" if self._name else "*"
        return self._keys.get(self._path(key)) or self._keys.get(any_name)

    def _siblings(self) -> list[str]:
        start = f"{self._name}." if self._name else ""
        names = [name for name in self._keys if name.startswith(start)]
        return [name for name in names if "." not in name[len(start) :]]

    def _checked(self, key: str, value: Any, kind: Any, what: str, default: Any) -> Any:
        is_flag = isinstance(value, bool) and kind is not bool
        if value is None or (isinstance(value, kind) and not is_flag):
            return value
        self._wrong(key, value, what)
        return default

    def _wrong(self, key: str, value: Any, what: str) -> None:
        self.findings.mistake(f"{self.where(key)}: expected {what}, got {describe(value)}.")


def filled(values: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping without what is not set."""
    return {key: value for key, value in values.items() if value not in (None, {}, [])}


def _is_one_of(value: Any, others: tuple[Any, ...]) -> bool:
    """Return whether a value is among others; True is not 1."""
    return any(type(value) is type(one) and value == one for one in others)
