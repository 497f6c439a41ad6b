"""What the page on data loaders says of resuming is what its tests find."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.reliability.loader_kinds import EXACT, EXPECTED, WARNED

ROW = re.compile(
    r"^\| (?P<kind>.+?) \| (?P<resumed>.+?) \|.*\| (?P<tested>`[^|]+) \|$", re.MULTILINE
)
NAME = re.compile(r"`([\w-]+)`")
WAY = re.compile(r"(-(0|2|persistent))?(-limited)?$")


def rows(root: Path) -> dict[str, str]:
    """Return what the page says of resuming, by kind."""
    text = (root / "docs" / "loading.md").read_text(encoding="utf-8")
    return {
        name: row["resumed"] for row in ROW.finditer(text) for name in NAME.findall(row["tested"])
    }


@pytest.mark.parametrize("kind", EXPECTED)
def test_each_kind_is_in_a_row_that_says_what_its_test_expects(root: Path, kind: str) -> None:
    found = rows(root)
    said = found.get(kind.removesuffix("-limited"), found.get(WAY.sub("", kind)))
    assert said is not None, f"{kind} is in no row"
    expected = EXPECTED[kind]
    if expected == EXACT:
        assert said.startswith(("exact", "as "))
        assert "warning" not in said
    elif expected == WARNED:
        assert said == "a warning"
    else:
        assert "warning" in said


def test_each_row_has_a_test(root: Path) -> None:
    kinds = {WAY.sub("", kind) for kind in EXPECTED} | set(EXPECTED)
    assert set(rows(root)) <= kinds
    assert len(rows(root)) > 30
