"""Models use no operation that reads from the device, or whose result has a size unknown before."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest

READING = {
    *("argwhere", "bincount", "item", "masked_select", "nonzero", "numpy", "one_hot"),
    *("tolist", "unique", "unique_consecutive"),
}


def reads(tree: ast.AST) -> Iterator[str]:
    """Yield "line: name" of each such operation."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in READING:
            yield f"{node.lineno}: {node.attr}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from (f"{node.lineno}: {one.name}" for one in node.names if one.name in READING)


@pytest.mark.parametrize(
    "code",
    [
        "functional.one_hot(ids)",
        "torch.bincount(ids)",
        "ids.nonzero()",
        "loss.item()",
        "from torch.nn.functional import one_hot",
    ],
)
def test_such_an_operation_is_found(code: str) -> None:
    assert list(reads(ast.parse(code)))


def test_no_model_has_one(sources: list[Any]) -> None:
    found = [
        f"{source.name}:{what}"
        for source in sources
        if source.name.startswith("modelzoo_trainer/zoo/models/")
        for what in reads(source.tree)
    ]
    assert found == []
