"""Names of a package that are imported from their modules when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return functions that can be a package's `__getattr__` and `__dir__`.

    Args:
        package: The name of the package.
        homes: Names in it by the module that defines them, relative to `modelzoo_trainer`.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"modelzoo_trainer.{home_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted({*home_of, *vars(sys.modules[package])})


def load(path: str) -> Any:
    """Return what `module:name` names; this imports the module."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
