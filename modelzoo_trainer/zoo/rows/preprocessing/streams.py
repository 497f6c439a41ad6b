"""Streams: the splits of the data, each with its sequence length and output folder."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.interface import Document
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings

_RANGE: Final = 2**64
_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]+)?")


@dataclass(frozen=True, slots=True)
class OutputStream:
    """Rows of one length that are written to one folder."""

    folder: str
    """Relative to the output folder; "" = the folder itself."""
    length: int
    """Tokens of a row."""


@dataclass(frozen=True, slots=True)
class _Shares:
    """Borders in the range of a hash, one after each share."""

    borders: tuple[int, ...]

    @classmethod
    def of(cls, fractions: Sequence[Any], where: str) -> _Shares:
        """Return the borders for fractions that sum to 1."""
        exact = [_fraction(one, where) for one in fractions]
        if sum(exact) != 1:
            raise ConfigError(f"{where}: the fractions must sum to 1, got {float(sum(exact)):g}.")
        return cls(tuple(int(border * _RANGE) for border in accumulate(exact)))

    def index(self, number: int) -> int:
        """Return the share that a hash falls into."""
        return bisect_right(self.borders, number)


class Streams:
    """All streams of a run, and which document belongs to which.

    A document is assigned by a hash of its file and number: adding files moves no other document.

    Raises:
        ConfigError: If fractions or lengths are invalid.
    """

    def __init__(self, settings: PreprocessingSettings) -> None:
        setup, processing = settings.setup, settings.processing
        self._seed = processing.split_seed
        self.all: list[OutputStream] = []
        self._splits: _Shares | None = None
        self._contexts: list[_Shares | None] = []
        self._first: list[int] = []
        length = processing.max_seq_length
        if not setup.data_splits:
            self._add("", setup.context_splits, length, "setup.context_splits")
            return
        fractions = []
        for name, split in setup.data_splits.items():
            where = f"setup.data_splits.{name}"
            if not isinstance(split, Mapping) or "split_fraction" not in split:
                raise ConfigError(f"{where}.split_fraction: missing.")
            if unknown := set(split) - {"split_fraction", "context_splits"}:
                raise ConfigError(f"{where}.{min(unknown)}: no such setting.")
            if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
                raise ConfigError(f"{where}: {name!r} is not a valid name of a folder.")
            fractions.append(split["split_fraction"])
            context = split.get("context_splits") or setup.context_splits
            self._add(name, context, length, f"{where}.context_splits")
        self._splits = _Shares.of(fractions, "setup.data_splits")

    def index(self, document: Document) -> int:
        """Return the index of the stream of a document in `all`."""
        split = 0 if self._splits is None else self._splits.index(document.hash(self._seed))
        contexts = self._contexts[split]
        inner = 0 if contexts is None else contexts.index(document.hash(f"{self._seed} length"))
        return self._first[split] + inner

    def _add(self, name: str, contexts: Any, length: int, where: str) -> None:
        self._first.append(len(self.all))
        if not contexts:
            self._contexts.append(None)
            self.all.append(OutputStream(name, length))
            return
        expected = {"MSL_List", "split_fractions"}
        if not isinstance(contexts, Mapping) or set(contexts) != expected:
            raise ConfigError(f"{where}: expected MSL_List and split_fractions.")
        for key in sorted(expected):
            if not isinstance(contexts[key], list):
                raise ConfigError(f"{where}.{key}: expected a list, got {contexts[key]!r}.")
        lengths = [_length(one, where) for one in contexts["MSL_List"]]
        fractions = contexts["split_fractions"]
        if len(set(lengths)) != len(lengths) or len(fractions) != len(lengths):
            raise ConfigError(
                f"{where}: expected different lengths and one fraction for each, got "
                f"{contexts['MSL_List']} and {fractions}."
            )
        self._contexts.append(_Shares.of(fractions, f"{where}.split_fractions"))
        for one, shown in zip(lengths, contexts["MSL_List"], strict=True):
            folder = f"msl_{shown}"
            self.all.append(OutputStream(f"{name}/{folder}" if name else folder, one))


def _fraction(value: Any, where: str) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f"{where}: expected a fraction from 0 to 1, got {value!r}.")
    try:
        exact = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        exact = Fraction(-1)
    if not 0 <= exact <= 1:
        raise ConfigError(f"{where}: expected a fraction from 0 to 1, got {value!r}.")
    return exact


def _length(value: Any, where: str) -> int:
    """Return a number of tokens; `1K` is 1024, `0.5K` 512."""
    text = str(value).strip().upper()
    digits = text.removesuffix("K")
    is_number = _NUMBER.fullmatch(digits) is not None
    length = Fraction(digits) * (1 if digits == text else 1024) if is_number else Fraction(0)
    if length.denominator != 1 or length <= 0:
        raise ConfigError(
            f"{where}.MSL_List: expected a number of tokens, such as 2048, 2K or 0.5K; got "
            f"{value!r}."
        )
    return int(length)
