"""What the modules offer."""

from __future__ import annotations

import ast
import importlib
import re
from typing import Any


def exported(tree: ast.Module) -> list[str] | None:
    """Return a module's `__all__`, or None if it has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def gathered(source: Any) -> set[str]:
    """Return the public names that a package takes from its own modules.

    `import X as X` offers X as well, to people alone: it stays out of the registries. What the
    package itself calls is not for others.
    """
    called = {
        node.func.id
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    names: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and is_inside(node, source.module):
            names |= {alias.name for alias in node.names if alias.asname != alias.name}
    return {name for name in names if not name.startswith("_")} - called


def is_inside(node: ast.ImportFrom, package: str) -> bool:
    return node.level == 1 or (node.module or "").startswith(f"{package}.")


def rank(name: str) -> tuple[int, list[Any]]:
    """Return what sorts constants first, then classes, then functions, each naturally."""
    parts = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    if name.isupper():
        return 0, parts
    return (1 if name[:1].isupper() else 2), parts


def test_constants_come_first_then_classes_then_functions() -> None:
    names = ["make", "HOOKS", "Part10", "Part9", "Backend"]
    assert sorted(names, key=rank) == ["HOOKS", "Backend", "Part9", "Part10", "make"]


def test_a_package_that_gathers_names_offers_them_all(sources: list[Any]) -> None:
    packages = [source for source in sources if source.name.endswith("/__init__.py")]
    left_out = {
        source.name: gathered(source) - set(exported(source.tree) or []) for source in packages
    }
    assert len(packages) >= 8
    assert {name: names for name, names in left_out.items() if names} == {}


def test_what_is_offered_is_sorted_and_given_once(sources: list[Any]) -> None:
    offered = {source.name: exported(source.tree) or [] for source in sources}
    unsorted = [name for name, names in offered.items() if names != sorted(set(names), key=rank)]
    assert offered["backends/__init__.py"]
    assert unsorted == []


def test_what_is_offered_exists(sources: list[Any]) -> None:
    missing = [
        f"{source.module}.{name}"
        for source in sources
        for name in exported(source.tree) or []
        if not hasattr(importlib.import_module(source.module), name)
    ]
    assert missing == []


def test_a_public_class_name_means_one_thing(sources: list[Any]) -> None:
    homes: dict[str, list[str]] = {}
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(source.name)
    assert len(homes) > 500
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}
