"""What the page on how it works says of the code is in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SPAN = re.compile(r"`([^`]+)`")


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "how_it_works.md").read_text(encoding="utf-8")


def file_rows(text: str) -> list[list[str]]:
    """Return the cells of the table under the heading "Files"."""
    section = text.partition("\n## Files\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_lifecycle_is_the_golden_trace(page: str, root: Path) -> None:
    shown = re.findall(r"<!-- lifecycle -->\n```text\n(.*?)```", page, re.DOTALL)
    golden = (root / "tests/golden/fit_hooks.txt").read_text(encoding="utf-8")
    assert shown == [golden]


def test_the_file_map_names_files_that_are_there(page: str, root: Path) -> None:
    paths = [path for row in file_rows(page) for path in SPAN.findall(row[0])]
    assert len(paths) > 10
    assert [path for path in paths if not (root / path).exists()] == []


def test_the_file_map_has_every_folder_of_the_trainer(page: str, root: Path) -> None:
    named = {path.rstrip("/") for row in file_rows(page) for path in SPAN.findall(row[0])}
    there = {
        path.relative_to(root).as_posix()
        for path in (root / "modelzoo_trainer").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert there - named == set()


def test_files_in_the_purposes_lie_in_their_folder(page: str, root: Path) -> None:
    missing = [
        f"{folder}{name}"
        for row in file_rows(page)
        for folder in SPAN.findall(row[0])[:1]
        for name in SPAN.findall(row[1])
        if name.endswith((".py", ".yaml")) and " " not in name
        if not (root / folder / name).exists()
    ]
    assert missing == []
