"""The tutorials: their cells are Python outside of a notebook, and are stored without outputs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

TUTORIALS = sorted((Path(__file__).resolve().parents[2] / "docs" / "tutorials").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_there_are_tutorials() -> None:
    assert {path.stem for path in TUTORIALS} >= {"digits_cnn", "why_did_it_get_worse"}


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_cells_are_python_without_magics(path: Path) -> None:
    cells = code_cells(path)
    assert len(cells) > 3
    for cell in cells:
        ast.parse("".join(cell["source"]), filename=path.name)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_cells_are_stored_without_outputs(path: Path) -> None:
    stored = [cell for cell in code_cells(path) if cell["outputs"] or cell["execution_count"]]
    assert stored == []
