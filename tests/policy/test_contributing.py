"""What the page for contributors says of the code is in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

WALKS = ("A batch", "A loss", "A metric", "A checkpoint")


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "contribute.md").read_text(encoding="utf-8")


def members_of(sources: list[Any]) -> dict[str, set[str]]:
    """Return the names of methods by class, of all classes."""
    found: dict[str, set[str]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                found.setdefault(node.name, set()).update(names)
    return found


@pytest.mark.slow_cases("A metric", "A checkpoint")
@pytest.mark.parametrize("walk", WALKS)
def test_every_stop_of_a_walk_is_there(walk: str, page: str, sources: list[Any]) -> None:
    text = page.partition(f"**{walk}**: ")[2].partition("\n\n")[0]
    stops = re.findall(r"(?<!\w)\d\s`(\w+)(?:\.(\w+))?`", text)
    numbers = re.findall(r"(?<!\w)(\d)\s`", text)
    members = members_of(sources)
    functions = {
        node.name for one in sources for node in one.tree.body if isinstance(node, ast.FunctionDef)
    }
    assert numbers == [str(number + 1) for number in range(len(stops))]
    assert 5 <= len(stops) <= 8
    for owner, method in stops:
        if method:
            assert method in members[owner]
        else:
            assert owner in members or owner in functions


RECIPES = {  # the files that each needs at most, without generated ones and the changelog
    "callback": 4,
    "hook": 4,
    "backend": 3,
    "model": 3,
    "data processor": 3,
    "optimizer": 4,
}


@pytest.mark.parametrize("kind", RECIPES)
def test_a_recipe_names_its_steps_files_and_tables(kind: str, page: str, root: Path) -> None:
    text = page.partition(f"<!-- recipe: {kind} -->\n")[2].partition("\n\n")[0]
    numbers = re.findall(r"^(\d)\. ", text, re.MULTILINE)
    assert numbers == [str(idx + 1) for idx in range(len(numbers))]
    assert 3 <= len(numbers) <= 4
    paths = re.findall(r"`((?:[\w.]+/)+[\w.]*)`", text)
    assert [path for path in paths if not (root / path).exists()] == []
    assert 2 <= len(set(paths)) <= RECIPES[kind]
    assert re.search(r"`python -m pytest -n auto tests/[^`]+`", text), "which tests to run"
    assert "(#last-steps-of-every-recipe)" in text
    for table, path in re.findall(r"`([A-Z_]+)` of `([\w./]+)`", text):
        assert re.search(rf"^{table}\b", (root / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_files_and_folders_that_it_names_are_there(page: str, root: Path) -> None:
    named = re.findall(r"`((?:[\w.]+/)+[\w.]*)`", page)
    places = [root, root / "modelzoo_trainer", root / "backends"]
    missing = [path for path in named if not any((place / path).exists() for place in places)]
    assert len(named) > 15
    assert missing == []
