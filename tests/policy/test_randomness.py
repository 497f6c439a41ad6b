"""Tests draw the same numbers in each run, so that none fails by chance."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

_OF_THE_SYSTEM = ("os.urandom", "secrets", "uuid", "random.SystemRandom")


def _unseeded(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that draw what differs from run to run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names = [module, *(f"{module}.{one.name}" for one in node.names)] if module else []
            names += [] if module else [one.name for one in node.names]
            if any(name in _OF_THE_SYSTEM for name in names):
                yield node.lineno
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in _OF_THE_SYSTEM:
            yield node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = [ast.unparse(one) for one in node.decorator_list]
            is_drawn = any(one.startswith("given(") for one in decorators)
            if is_drawn and not any("derandomize=True" in one for one in decorators):
                yield node.lineno


def test_no_test_draws_from_the_system_or_with_another_seed_each_time(root: Path) -> None:
    found = [
        f"{path.relative_to(root)}:{line}"
        for path in sorted((root / "tests").rglob("*.py"))
        for line in _unseeded(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("import os\nx = os.urandom(3)", [2]),
        ("import secrets", [1]),
        ("from uuid import uuid4", [1]),
        ("from os import path, urandom", [1]),
        ("@given(x)\ndef test(x): ...", [2]),
        ("@settings(derandomize=True)\n@given(x)\ndef test(x): ...", []),
        ("import random\nx = random.Random(1).random()", []),
    ],
)
def test_what_differs_from_run_to_run_is_found(text: str, lines: list[int]) -> None:
    assert [*_unseeded(ast.parse(text))] == lines


@pytest.mark.parametrize("repeated", [1, 2])
def test_each_test_begins_with_the_same_numbers(repeated: int) -> None:
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    assert drawn == (0.8444218515250481, 0.5488135039273248, 0.49625658988952637)
