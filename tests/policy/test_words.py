"""Phrases that are not used where a reader sees them; docs/words.txt has single words."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_WORDS = 40
FENCE = re.DOTALL | re.MULTILINE

_NO_QUANTITY = "".join(rf"(?<!\b{one} )" for one in ("all", "each", "least", "none", "one", "some"))
SAY = {  # pattern: what to say instead
    r"\b(?:every|for) so (?:many|often)\b|\bso many (?:steps|batches|seconds)\b": "n steps",
    r"(?<!there )\b(?:is|are) no (?:number|integer|file|folder|checkpoint|tensor|mapping|text)\b": (
        "is not a ..."
    ),
    r"\bpass(?:es|ed|ing)? over\b": "skip",
    r"\btak(?:e|es|en|ing) up again\b": "resume",
    r"\bwithout a word\b": "by default",
    r"\b(?:one's|of his) own\b": "custom, separate",
    r"\bat hand\b": "current",
    r"\b(?:is|are|be) through with\b": "has finished",
    r"\ba second call does nothing\b": "Idempotent.",
    r"\b(?:was|were|is) asked for\b": "requested, configured",
    r"\b(?:has|have) to be\b": "must be",
    r"\bon paper\b": "in a plan",
    r"\bdata sets?\b": "dataset",
    r"\bfiller\b": "padding batch",
    r"\bheed(?:s|ed|ing)?\b": "stop",
    r"\banew\b": "again",
    r"\bwhoever\b": "the caller, the user",
    r"\b(?:that|those) of\b(?! course)": "the noun again, or a genitive: the model's settings",
    # "two, one of which is complete" is English; "two, of which one is complete" is not.
    rf"{_NO_QUANTITY}\bof (?:which|whose)\b": "another sentence: each rank has its part",
    r"\bthat which\b": "what, the one that",
    r"[.!?] of (?:an?|the|several|these|those) [^.:]+, ": "the subject first",
}


def files() -> list[Path]:
    """Return what a reader may see: sources and pages."""
    found = [*(ROOT / "backends").rglob("*.py"), *(ROOT / "modelzoo_trainer").rglob("*.py")]
    found += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(found)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and strings of a source, or the paragraphs of a page."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        for found in re.finditer(r"(?:.+\n?)+", content):
            yield content.count("\n", 0, found.start()) + 1, found.group()
        return
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def complaints(path: Path) -> list[str]:
    """Return the phrases of a file that are not used, with what to say instead."""
    return [
        f"{path}:{line}: {found.group()!r}: say {say!r}"
        for line, text in texts(path)
        for pattern, say in SAY.items()
        if (found := re.search(pattern, " ".join(text.split()), re.IGNORECASE))
    ]


def long_cells(path: Path) -> list[str]:
    """Return where a table of a page has cells of more than `MOST_WORDS` words; code is a word."""
    page = re.sub(r"^ *```.*?^ *```$", _blank, path.read_text(encoding="utf-8"), flags=FENCE)
    return [
        f"{path}:{line}: {len(words)} words in a cell: write sentences below the table"
        for line, row in enumerate(page.splitlines(), 1)
        if row.startswith("|")
        for cell in re.split(r"(?<!\\)\|", re.sub(r"`[^`]*`", "code", row))
        if len(words := cell.split()) > MOST_WORDS
    ]


def _blank(found: re.Match[str]) -> str:
    return "\n" * found.group().count("\n")


def test_no_retired_phrase_is_used() -> None:
    checked = files()
    assert {"backends", "loading", "supervisor"} <= {path.parent.name for path in checked}
    assert [line for path in checked for line in complaints(path)] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""Return the step at\n    hand."""\n'),
        ("a.py", 'raise ValueError(f"{x} is no number")\n'),
        ("a.md", "Batches are passed over.\n"),
        ("a.md", "The defaults are those\nof GPT-2.\n"),
        ("a.md", "Each rank gets the states, of which it has a part.\n"),
        ("a.py", '"""Read a file. Of a large one, only the header is read."""\n'),
    ],
)
def test_a_retired_phrase_is_found(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    [line] = complaints(path)
    assert line.startswith(f"{path}:1: ")


def test_other_text_is_not_complained_about(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        '"""Return two steps, one of which is the current one."""\nanew = 1\n', encoding="utf-8"
    )
    assert complaints(path) == []


def test_cells_of_tables_are_short() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert len(pages) > 30
    assert [line for path in pages for line in long_cells(path)] == []


def test_a_long_cell_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    block = "```\n| " + "no " * 41 + "|\n```\n"
    path.write_text(f"{block}| a | `b \\| c` {'d ' * 40}|\n| {'e ' * 40}|\n", encoding="utf-8")
    [line] = long_cells(path)
    assert line.startswith(f"{path}:4: 41 words")
