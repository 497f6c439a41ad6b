"""What the README shows is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SPAN = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block."""

    line: int
    language: str
    marker: str  # the line before the fence
    text: str


def blocks_of(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a Markdown text."""
    lines = text.splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        yield Block(
            line=start + 1,
            language=lines[start][3:],
            marker=lines[start - 1] if start else "",
            text="\n".join(lines[start + 1 : number]) + "\n",
        )
        start = None


def file_rows(text: str) -> list[list[str]]:
    """Return the cells of the table under the heading "Files"."""
    section = text.partition("\n## Files\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def blocks(readme: str) -> list[Block]:
    return list(blocks_of(readme))


def test_blocks_are_found_with_their_markers() -> None:
    text = "x\n<!-- test -->\n```python\na = 1\n```\n\n```\nb\n```\n"
    assert list(blocks_of(text)) == [
        Block(line=3, language="python", marker="<!-- test -->", text="a = 1\n"),
        Block(line=7, language="", marker="", text="b\n"),
    ]


@pytest.mark.slow
def test_the_programs_run(blocks: list[Block], root: Path, tmp_path: Path) -> None:
    programs = [block for block in blocks if block.marker == "<!-- test -->"]
    failed = {}
    for number, program in enumerate(programs):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program.text],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            failed[f"README.md:{program.line}"] = done.stderr
    assert {program.language for program in programs} == {"python"}
    assert failed == {}


def test_every_python_program_is_tested(blocks: list[Block]) -> None:
    untested = [b.line for b in blocks if b.language == "python" and b.marker != "<!-- test -->"]
    assert untested == []


def test_the_lifecycle_is_the_golden_trace(blocks: list[Block], root: Path) -> None:
    shown = [block.text for block in blocks if block.marker == "<!-- lifecycle -->"]
    golden = (root / "tests/golden/fit_hooks.txt").read_text(encoding="utf-8")
    assert shown == [golden]


@pytest.mark.parametrize("marker", ["<!-- ci: train -->", "<!-- ci: test -->", "<!-- ci: xla -->"])
def test_the_commands_that_are_checked_are_there_once(marker: str, blocks: list[Block]) -> None:
    assert [block.language for block in blocks if block.marker == marker] == ["bash"]


def test_the_file_map_names_files_that_are_there(readme: str, root: Path) -> None:
    paths = [path for row in file_rows(readme) for path in SPAN.findall(row[0])]
    assert len(paths) > 10
    assert [path for path in paths if not (root / path).exists()] == []


def test_the_file_map_has_every_folder_of_the_trainer(readme: str, root: Path) -> None:
    named = {path.rstrip("/") for row in file_rows(readme) for path in SPAN.findall(row[0])}
    there = {
        path.relative_to(root).as_posix()
        for path in (root / "modelzoo_trainer").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert there - named == set()


def test_files_in_the_purposes_lie_in_their_folder(readme: str, root: Path) -> None:
    missing = [
        f"{folder}{name}"
        for row in file_rows(readme)
        for folder in SPAN.findall(row[0])[:1]
        for name in SPAN.findall(row[1])
        if name.endswith((".py", ".yaml")) and " " not in name
        if not (root / folder / name).exists()
    ]
    assert missing == []
