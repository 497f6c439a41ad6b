"""An assert only tells a type checker what is known: `python -O` removes it."""

from __future__ import annotations

import ast
from typing import Any

import pytest


def is_plain(node: ast.expr) -> bool:
    """Return whether an expression is a name, or attributes of one."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def narrows(node: ast.Assert) -> bool:
    """Return whether an assert says no more than that a name is not None, or of which class."""
    match node:
        case ast.Assert(
            test=ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]),
            msg=None,
        ):
            return is_plain(left)
        case ast.Assert(
            test=ast.Call(func=ast.Name(id="isinstance"), args=[left, _], keywords=[]), msg=None
        ):
            return is_plain(left)
    return False


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("assert x is not None", True),
        ("assert self.x.y is not None", True),
        ("assert isinstance(self.x, int)", True),
        ("assert x", False),
        ("assert x is None", False),
        ("assert x.f() is not None", False),
        ("assert x is not None, 'why'", False),
        ("assert isinstance(f(x), int)", False),
        ("assert x is not None and y", False),
        ("assert len(x) == 2", False),
    ],
)
def test_what_narrows_is_told_from_what_validates(code: str, expected: bool) -> None:
    node = ast.parse(code).body[0]
    assert isinstance(node, ast.Assert)
    assert narrows(node) is expected


def test_no_assert_validates(sources: list[Any]) -> None:
    found = [
        f"{source.name}:{node.lineno}"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assert) and not narrows(node)
    ]
    assert found == [], "raise an error with a message: python -O removes asserts"
