"""The longest files and functions, for a reader: pytest -s tests/policy/test_sizes.py."""

from __future__ import annotations

import ast
from typing import Any


def longest(sizes: dict[str, int]) -> list[str]:
    """Return the ten longest, as lines of a table."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return [f"{size:6d}  {name}" for name, size in ordered[:10]]


def test_the_ten_longest_come_first() -> None:
    table = longest({f"f{size}": size for size in range(20)})
    assert table[0].split() == ["19", "f19"]
    assert len(table) == 10


def test_the_longest_files_are_printed(sources: list[Any]) -> None:
    table = longest({source.name: len(source.text.splitlines()) for source in sources})
    print("\nlines  file (300 are enough)", *table, sep="\n")
    assert len(table) == 10


def test_the_longest_functions_are_printed(sources: list[Any]) -> None:
    table = longest(
        {
            f"{source.name}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
            for source in sources
            for node in ast.walk(source.tree)
            if isinstance(node, ast.FunctionDef)
        }
    )
    print("\nlines  function (40 are enough)", *table, sep="\n")
    assert len(table) == 10
