"""Where files may lie."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import modelzoo_trainer

PACKAGES = ("backends", "modelzoo_trainer")
# A function goes where its noun lives.
NO_NOUN = {"common", "helper", "helpers", "misc", "shared", "util", "utils"}
MOST_ENTRIES = 16
LAZY = ["modelzoo_trainer", *(f"modelzoo_trainer.{n}" for n in ("callbacks", "loggers", "core"))]


def folders_of(package: Path) -> list[Path]:
    inside = [path for path in package.rglob("*") if path.is_dir() and path.name != "__pycache__"]
    return [package, *inside]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_a_regular_one_that_says_it_is_typed(package: str, root: Path) -> None:
    assert (root / package / "__init__.py").is_file()
    assert (root / package / "py.typed").is_file()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_with_modules_has_an_init_file(package: str, root: Path) -> None:
    bare = [
        path.relative_to(root).as_posix()
        for path in folders_of(root / package)
        if list(path.glob("*.py")) and not (path / "__init__.py").is_file()
    ]
    assert bare == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_is_named_after_nothing(package: str, root: Path) -> None:
    paths = [*(root / package).rglob("*.py"), *folders_of(root / package)]
    found = [path.relative_to(root).as_posix() for path in paths if path.stem in NO_NOUN]
    assert found == []


def entries(root: Path) -> set[str]:
    """Return what lies directly in the package, without its own files."""
    return {
        path.name
        for path in (root / "modelzoo_trainer").iterdir()
        if not path.name.startswith("__") and path.name != "py.typed"
    }


def test_every_room_has_a_floor(root: Path) -> None:
    """What lies on none could import anything; the contract itself cannot ask for it."""
    tools = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    layers = tools["importlinter"]["contracts"][0]["layers"]
    names = [name.strip() for layer in layers for name in re.split(r"[:|]", layer)]
    assert len(names) == len(set(names))
    assert set(names) - {"__main__"} == {name.removesuffix(".py") for name in entries(root)}


NAMED_UPWARD = {
    ("callbacks", "zoo"): "callbacks for kinds of models, in the registry of all",
    ("callbacks", "tools"): "callbacks that test or report a run, in the registry of all",
    ("checkpointing.weight_readers", "zoo"): "the reader of weights of Hugging Face",
    ("hooks.order", "callbacks"): "the default CheckLoss, and the limit of the environment",
    ("hooks.order", "loggers"): "the default ProgressLogger",
}
"""What names a room above its own as text, or imports it by a lazy name: module, room, reason."""


def floor_of(root: Path) -> dict[str, int]:
    tools = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    layers = tools["importlinter"]["contracts"][0]["layers"]
    return {
        name.strip(): -number
        for number, layer in enumerate(layers)
        for name in re.split(r"[:|]", layer)
    }


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module without blocks for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from runtime_nodes(node)


def rooms_named(tree: ast.AST) -> set[str]:
    """Return the rooms whose modules are named as text, or imported by a lazy name."""
    found = set()
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {*re.findall(r"^modelzoo_trainer\.([a-z_]+)\.[a-z_.]+(?::\w+)?$", node.value)}
        elif isinstance(node, ast.ImportFrom) and node.module in LAZY:
            homes = importlib.import_module(node.module)._HOMES
            names = {alias.name for alias in node.names}
            found |= {home.partition(".")[0] for home, own in homes.items() if names & {*own}}
    return found


def test_rooms_above_are_named_for_a_reason_only(root: Path, sources: list[Any]) -> None:
    """The contract sees no import by a dotted text, nor by a name of a lazy package."""
    floors = floor_of(root)
    found = set()
    for source in sources:
        package, _, module = source.module.partition(".")
        room = module.partition(".")[0]
        if package != "modelzoo_trainer" or room in ("", "_moved"):
            continue
        named = rooms_named(source.tree)
        if source.name.endswith("__init__.py"):
            homes = getattr(importlib.import_module(source.module), "_HOMES", ())
            named |= {home.partition(".")[0] for home in homes}
        above = {one for one in named & floors.keys() if floors[one] > floors[room]}
        found |= {(module, one) for one in above}
    assert found == NAMED_UPWARD.keys()


def test_the_package_has_few_entries(root: Path) -> None:
    assert len(entries(root)) <= MOST_ENTRIES


def test_no_folder_of_tests_shadows_the_backends(root: Path) -> None:
    assert not (root / "tests/backends").exists()  # the tests of devices are in tests/device


def test_tests_are_no_package(root: Path) -> None:
    assert [str(path) for path in (root / "tests").rglob("__init__.py")] == []


def test_the_licence_and_the_pins_are_there(root: Path) -> None:
    assert "Apache License" in (root / "LICENSE").read_text(encoding="utf-8")
    assert "torch==" in (root / "constraints.txt").read_text(encoding="utf-8")


def test_the_package_and_the_project_have_one_version(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == modelzoo_trainer.__version__
