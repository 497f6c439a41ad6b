"""The tables of settings and environments: what differs between runs, and what is the same."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from modelzoo_trainer.tools.report.alignment import align
from modelzoo_trainer.tools.report.data_size import ABOUT

_LONGEST_CELL: Final = 300
_RUN_DIR: Final = ("model_dir",)  # always differs
_SEED: Final = ("seed",)
_RESOLVED: Final = re.compile(
    r"trainer\.init\.(seed|device|optimizer|optimizers|schedulers|precision|loop|checkpoint|logging"
    r"|callbacks|loggers|model_dir)\b"
)
"""Settings in a file that `run.json` has as well, named as in Python."""
_KEPT_PARTS: Final = 2  # of a short path
_THIN_SPACE: Final = "\u2009"


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting: its path, a short name, and the cell of each run as HTML.

    None = the run does not record it.
    """

    path: str
    """Its full path; if it has another one in another run, all of them."""
    name: str
    cells: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Facts of several runs: different, only in some and the same there, or the same in all."""

    differing: list[SettingRow]
    """Other optimizers and schedules first, then the numbers that changed most, seeds last."""
    partial: list[SettingRow]
    same: list[SettingRow]


def under_common_names(
    found: Sequence[Mapping[str, str]], resolved: Sequence[Mapping[str, str]]
) -> list[Mapping[str, str]]:
    """Return the settings of runs from files and from Python under the names of Python.

    Without a run of each kind, the settings are unchanged. What a trainer does not know, such as
    the arguments of a model, keeps its path in the file.
    """
    is_of_file = [own != python for own, python in zip(found, resolved, strict=True)]
    kinds = {of_file for own, of_file in zip(found, is_of_file, strict=True) if own}
    if len(kinds) < 2:
        return list(found)
    return [
        {**_only_in_file(own), **python} if of_file and _is_recorded(python) else own
        for own, python, of_file in zip(found, resolved, is_of_file, strict=True)
    ]


def _is_recorded(python: Mapping[str, str]) -> bool:
    """Return whether a run recorded settings beside the sizes of its data."""
    return any(key.startswith("loop.") for key in python)


def _only_in_file(own: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in own.items() if not _RESOLVED.match(key)}


def without_overridden(settings: Mapping[str, str], paths: Iterable[str]) -> dict[str, str]:
    """Return settings without those whose values a schedule replaces.

    `paths`: as in Python, such as `optimizer.SGD.lr`; in a file the class may have a longer name,
    and the learning rate its other one.
    """
    forms = []
    for path in paths:
        owner, _, name = path.rpartition(".")
        root, _, kind = owner.rpartition(".")
        names = ("lr", "learning_rate") if name == "lr" else (name,)
        forms.append(
            rf"(?:trainer\.init\.)?{re.escape(root)}\.(?:[\w.]+\.)?{re.escape(kind)}"
            rf"\.(?:{'|'.join(map(re.escape, names))})"
        )
    form = re.compile("|".join(forms) or r"(?!)")
    return {key: value for key, value in settings.items() if not form.fullmatch(key)}


def compared(found: Sequence[Mapping[str, str]]) -> Comparison:
    """Compare facts of runs; of one run, all are "the same".

    A fact differs if two runs have different values; others may lack it.
    """
    aligned = align(found)
    found = aligned.found
    keys = list(dict.fromkeys(key for one in found for key in one))
    if len(found) > 1:
        keys = [key for key in keys if not _ends(key, _RUN_DIR)]
    values = {key: [one.get(key) for one in found] for key in keys}
    same = [key for key in keys if len(set(values[key])) == 1]
    rest = [key for key in keys if len(set(values[key]) - {None}) > 1]
    partial = [key for key in keys if key not in same and key not in rest]
    rest.sort(key=lambda key: (key not in aligned.classes, *_order(key, values[key])))
    short = short_paths([*rest, *partial])
    short |= {key: key.removeprefix("trainer.init.") for key in aligned.classes}
    paths = {key: " | ".join(aligned.paths.get(key, [key])) for key in keys}
    return Comparison(
        [
            SettingRow(
                paths[key], short[key], _changed(values[key], has_ratio=not _ends(key, _SEED))
            )
            for key in rest
        ],
        [SettingRow(paths[key], short[key], tuple(map(_cell, values[key]))) for key in partial],
        [SettingRow(paths[key], key, (_cell(values[key][0]),)) for key in same],
    )


def _ends(key: str, names: Iterable[str]) -> bool:
    return key.rpartition(".")[2] in names


def _order(key: str, values: Sequence[str | None]) -> tuple[bool, float]:
    """Return the key for sorting: large ratios first, then other values, then seeds."""
    return _ends(key, _SEED), -effect(values)


def effect(values: Sequence[str | None]) -> float:
    """Return by how much the known numbers differ, as the logarithm of the largest ratio.

    Infinite for a change from or to zero or of sign; -1 for what is not a number.
    """
    numbers = [_number(value) for value in values if value is not None]
    known = [number for number in numbers if number is not None]
    if not known or len(known) < len(numbers):
        return -1.0
    low, high = min(known), max(known)
    if low <= 0 <= high:
        return math.inf
    return abs(math.log(abs(high)) - math.log(abs(low)))


def _number(value: str | None) -> float | None:
    try:
        number = float((value or "").removeprefix(ABOUT).replace(_THIN_SPACE, ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _changed(values: Sequence[str | None], *, has_ratio: bool) -> tuple[str | None, ...]:
    """Return cells with the ratio to the first run's number."""
    cells = [_cell(value) for value in values]
    first = _number(values[0])
    for idx, value in enumerate(values):
        number = _number(value)
        if has_ratio and idx and first and number and number != first and number / first > 0:
            cells[idx] = f"{cells[idx]} <small>(&times; {_ratio(number / first)})</small>"
    return tuple(cells)


def _ratio(value: float) -> str:
    """Format a ratio with three digits, without an exponent unless it is very large or small."""
    return f"{float(f'{value:.3g}'):.7g}"


def _cell(text: str | None) -> str | None:
    if text is None:
        return None
    return escape(text if len(text) <= _LONGEST_CELL else f"{text[:_LONGEST_CELL]} ...")


def short_paths(keys: Sequence[str]) -> dict[str, str]:
    """Return the last parts of paths, as many as tell them apart, without list positions."""
    found = {}
    for key in keys:
        for num in range(_KEPT_PARTS, key.count(".") + 2):
            name = _last(key, num)
            if all(other == key or _last(other, num) != name for other in keys):
                break
        else:
            name = key
        found[key] = name
    return found


def _last(key: str, num: int) -> str:
    parts = re.sub(r"\[\d+\]", "", key).split(".")
    return ".".join(parts[-num:])
