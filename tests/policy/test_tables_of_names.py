"""The tables that people write name every shipped class, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from modelzoo_trainer import callbacks, loggers
from modelzoo_trainer.optim import OPTIMIZERS, SCHEDULERS
from modelzoo_trainer.zoo.data import PROCESSORS
from modelzoo_trainer.zoo.models.registry import MODELS

CODE = re.compile(r"`([\w/-]+)`")
XLA = "| optimizer | supported | `CheckLoss: {policy: skip}` |"
WORD = re.compile(r"\b[A-Z]\w+")
BASES = {"ValidationCallback"}  # named beside what is shipped


def classes_of(module: object) -> set[str]:
    """Return the classes that a package exports."""
    names = getattr(module, "__all__", ())
    return {name for name in names if isinstance(getattr(module, name), type)}


def rows_below(text: str, head: str) -> list[list[str]]:
    """Return the cells of each row of the table with this first line."""
    lines = text.partition(f"\n{head}\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def in_cell(number: int, pattern: re.Pattern[str]) -> Callable[[list[str]], list[str]]:
    """Return a function that finds the names in one cell of a row."""
    return lambda row: pattern.findall(row[number])


def of_optimizers(row: list[str]) -> list[str]:
    """Return the optimizers of a row; those that are refused are torch's."""
    return WORD.findall(row[0]) if row[1] != "refused, with a suggestion" else []


TABLES = {
    "callbacks.md": ("| to | use |", in_cell(1, CODE), classes_of(callbacks) | BASES),
    "loggers.md": ("| name | where metrics go | install |", in_cell(0, CODE), classes_of(loggers)),
    "optimizers.md": ("| names | what they are |", in_cell(0, CODE), {*OPTIMIZERS}),
    "xla.md": (XLA, of_optimizers, {*OPTIMIZERS}),
    "models.md": ("| `name` | what it is | batch | outputs |", in_cell(0, CODE), {*MODELS}),
    "data_processors.md": ("| name | batches |", in_cell(0, CODE), {*PROCESSORS}),
}


def differences(
    text: str, head: str, names_in: Callable[[list[str]], list[str]], known: set[str]
) -> tuple[list[str], list[str]]:
    """Return the known names that a table lacks, and its names that are not known."""
    named = {name for row in rows_below(text, head) for name in names_in(row)}
    return sorted(known - named), sorted(named - known)


@pytest.mark.parametrize("page", TABLES)
def test_a_table_names_what_is_shipped(page: str, root: Path) -> None:
    head, names_in, known = TABLES[page]
    text = (root / "docs" / page).read_text(encoding="utf-8")
    missing, unknown = differences(text, head, names_in, known)
    where = f"the table {head!r} of docs/{page}"
    assert missing == [], f"{where} lacks {', '.join(missing)}"
    assert unknown == [], f"{where} has {', '.join(unknown)}, which this package lacks"


def test_the_section_on_schedules_names_those_of_the_learning_rate(root: Path) -> None:
    text = (root / "docs" / "optimizers.md").read_text(encoding="utf-8")
    section = text.partition("\n## Schedules\n")[2].partition("\n## ")[0]
    named = {*re.findall(r"`(\w+)`", section), *re.findall(r"\[(\w+)\]\(reference", section)}
    missing = [name for name in SCHEDULERS if name not in named and not name.endswith("WD")]
    assert missing == [], f"'## Schedules' of docs/optimizers.md lacks {', '.join(missing)}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\n| a | b |\n|---|---|\n| `x` | |\n| `y/z`, `w-1` | `v` |\n\n`u`", ([], [])),
        ("\n| a | b |\n|---|---|\n| `x` | |\n| `w-1` | |\n\n| `y/z` | |", (["y/z"], [])),
        ("\n| a | b |\n|---|---|\n| `x`, `new` | |\n| `w-1`, `y/z` | |\n", ([], ["new"])),
        ("| another | b |\n|---|---|\n| `x` | |\n", (["w-1", "x", "y/z"], [])),
    ],
)
def test_a_missing_and_an_unknown_name_are_found(
    text: str, found: tuple[list[str], list[str]]
) -> None:
    assert differences(text, "| a | b |", in_cell(0, CODE), {"x", "y/z", "w-1"}) == found
