"""Every program, command and file that the pages show runs, and prints what they show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.conftest import load_script

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMENT = re.compile(r"^ *<!-- (.+?) -->\n(?=(?: *<!--.*-->\n)* *```)", re.MULTILINE)
# What tests/policy/test_how_it_works.py and tests/compat/test_migration_pages.py look for.
TAGS = {"lifecycle", "after"}
# Programs that cannot run here, each with its reason on the page. Fewer is better.
NOT_RUN = {
    "docs/checkpoints.md": 1,
    "docs/evaluation.md": 1,
    "docs/contribute.md": 5,
    "docs/from_cerebras.md": 1,
    "docs/gpu.md": 3,
    "docs/install.md": 3,
    "docs/jobs.md": 1,
    "docs/object_stores.md": 2,
    "docs/scaling.md": 3,
    "docs/xla.md": 1,
}


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks_with(blocks: Any, name: str) -> dict[str, int]:
    """Return how many blocks of each page have a marker."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        num = sum(block.name == name for block in blocks.blocks_of(text))
        if num:
            found[named(page)] = num
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_blocks_of_a_page_run_and_print_what_it_shows(page: Path, blocks: Any) -> None:
    assert blocks.run_page(page).failures == []  # to renew outputs: python docs/blocks.py --update


def test_what_is_not_run_is_counted(blocks: Any) -> None:
    assert blocks_with(blocks, "not run") == NOT_RUN


def test_what_is_not_run_has_a_reason(blocks: Any) -> None:
    for page in PAGES:
        for block in blocks.blocks_of(page.read_text(encoding="utf-8")):
            assert block.name != "not run" or len(block.value) > 10, f"{page}:{block.line}"


def test_blocks_that_ci_runs_are_in_the_readme_alone(blocks: Any) -> None:
    assert blocks_with(blocks, "ci") == {"README.md": 4}


def test_no_comment_above_a_block_is_misspelt() -> None:
    comments = {
        f"{named(page)}: {comment}"
        for page in PAGES
        for comment in COMMENT.findall(page.read_text(encoding="utf-8"))
        if comment.partition(":")[0] not in {*load_script("blocks.py").MARKERS, *TAGS}
    }
    assert comments == set()


def test_outputs_are_texts(blocks: Any) -> None:
    outputs = [
        block
        for page in PAGES
        for block in blocks.blocks_of(page.read_text(encoding="utf-8"))
        if block.name == "output"
    ]
    assert outputs
    assert {block.language for block in outputs} == {"text"}


# ---- links

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    heads = re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", head).strip().lower() for head in heads]
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain}


def dead_links(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere."""
    found = []
    for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = page if not path else page.parent / path
        if not file.exists() or (
            anchor and file.suffix == ".md" and anchor not in anchors_of(file.read_text("utf-8"))
        ):
            found.append(target)
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "tests/README.md"], ids=named)
def test_no_link_is_dead(page: Path) -> None:
    assert dead_links(page) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "# A `b` c\n[1](#a-b-c) [2](#d) [3](none.md) [4](page.md#x) `[5](no)` [6](page.md)\n"
    page.write_text(text, encoding="utf-8")
    assert dead_links(page) == ["#d", "none.md", "page.md#x"]
