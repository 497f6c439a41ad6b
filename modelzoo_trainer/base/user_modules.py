"""Import what a user's file names: a module, or something in it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from modelzoo_trainer.errors import ConfigError, suggest


def is_path(name: str) -> bool:
    """Return whether a name is a dotted path, such as `package.module.Name`."""
    return "." in name


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


def import_path(path: str) -> Any:
    """Import and return the class or function at a dotted path.

    `path`: `package.module.Name`.

    Raises:
        ConfigError: If there is no such module, or no such name in it. Errors inside the module
            are raised unchanged.
    """
    module_name, _, name = path.rpartition(".")
    advice = "Give the path of a class or function: package.module.Name."
    module = import_module(module_name, advice)
    try:
        value = getattr(module, name, None)
    except ImportError as error:  # with a hint
        raise ConfigError(str(error)) from None
    if value is None:
        public = [known for known, item in vars(module).items() if isinstance(item, type)]
        raise ConfigError(f"{module_name} has no {name!r}. {suggest(name, public)}")
    if not callable(value):
        raise ConfigError(f"{path!r} is {value!r}; expected a class.")
    return value
