"""The repository's files, as the policy tests look at them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGES = ("backends", "modelzoo_trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One Python file."""

    name: str  # relative to the root, with slashes
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def sources(root: Path) -> list[Source]:
    """Every module of both packages."""
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return [Source(name=name, text=text, tree=ast.parse(text)) for name, text in texts.items()]
