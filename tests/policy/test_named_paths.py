"""Files and folders that pages, and comments of configurations, name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FROM_ROOT = re.compile(
    r"(?<![\w./\-{}>])(?:backends|benchmarks|configs|docs|modelzoo_trainer|tests|\.ci)/[\w./*-]*[\w*/]"
)
IN_CODE = re.compile(r"`((?:[\w.*-]+/)*[\w*-]+(?:\.py|/))`")
BLOCK = re.compile(r"```.*?```", re.DOTALL)
ABOUT_THE_CODE = ("contribute.md", "evidence.md", "how_it_works.md", "published.md")
ABSENT = {"utils.py", "__init__.py"}  # the project has none, of tests in the second case


def is_there(path: str, *folders: Path) -> bool:
    return any(any(folder.glob(path.rstrip("/"))) for folder in folders)


def lost(text: str, root: Path) -> list[str]:
    """Return the paths from the root that a text names and that are not there."""
    return [path for path in FROM_ROOT.findall(text) if not is_there(path, root)]


def test_paths_from_the_root_are_there(root: Path) -> None:
    globs = ("README.md", "docs/**/*.md", "tests/*.md", "configs/**/*.yaml", "tests/**/*.yaml")
    pages = [page for one in globs for page in root.glob(one)]
    texts = {page.relative_to(root).as_posix(): page.read_text("utf-8") for page in pages}
    assert sum(len(FROM_ROOT.findall(text)) for text in texts.values()) > 200
    assert {page: found for page, text in texts.items() if (found := lost(text, root))} == {}


@pytest.mark.parametrize("page", ABOUT_THE_CODE)
def test_files_on_a_page_about_the_code_are_in_the_tree(page: str, root: Path) -> None:
    text = BLOCK.sub("", (root / "docs" / page).read_text(encoding="utf-8"))
    folders = [root / name for name in ("backends", "benchmarks", "docs", "modelzoo_trainer")]
    named = set(IN_CODE.findall(text)) - ABSENT
    missing = [
        path
        for path in named
        if not is_there(path, root, root / "tests")
        and not any(is_there(f"**/{path}", folder) for folder in folders)
    ]
    assert missing == []


def test_folders_in_the_readme_of_the_tests_are_there(root: Path) -> None:
    text = BLOCK.sub("", (root / "tests" / "README.md").read_text(encoding="utf-8"))
    named = set(IN_CODE.findall(text)) - ABSENT
    assert [path for path in named if not is_there(path, root / "tests", root)] == []
    rows = set(re.findall(r"`(\w+)/`", text))
    folders = {path.name for path in (root / "tests").iterdir() if path.is_dir()}
    assert {name for name in folders - rows if name[0] not in "._"} == set(), "no row"


def test_a_lost_path_is_found(root: Path) -> None:
    text = "`tests/nowhere/` and tests/policy/*.py, docs/none.md; my/docs/x.md ../docs/y.md"
    assert lost(text, root) == ["tests/nowhere/", "docs/none.md"]
