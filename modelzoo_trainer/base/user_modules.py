"""Import a module that a user's file names."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from modelzoo_trainer.errors import ConfigError


def import_module(name: str, advice: str = "Name a module: package.module.") -> ModuleType:
    """Import and return a module.

    `advice`: what to write, if `name` cannot be a module.

    Raises:
        ConfigError: If there is no such module. Errors inside the module are raised unchanged.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{name!r} is not a valid module name. {advice}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there; one that it imports is not
        parent, _, last = error.name.rpartition(".")
        if parent in sys.modules and hasattr(sys.modules[parent], last):
            raise ConfigError(f"{error.name!r} is not a module. {advice}") from None
        if parent and last == "py":
            raise ConfigError(
                f"Cannot import {error.name!r}. Write {parent}, without .py."
            ) from None
        raise ConfigError(
            f"Cannot import {error.name!r}. Put it next to the YAML file or in the working "
            f"directory, or install it."
        ) from None
