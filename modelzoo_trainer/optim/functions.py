"""Functions given by their dotted paths."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from modelzoo_trainer.errors import ConfigError, suggest


def function_at(
    where: str, given: str | Callable[[int], float] | None
) -> Callable[[int], float] | None:
    """Return a function, imported if a dotted path was given.

    Raises:
        ConfigError: If there is no such module or function, or it belongs to Python's standard
            library other than `math`. Exceptions inside the module are not caught.
    """
    if given is None or callable(given):
        return given
    module_name, _, name = given.rpartition(".")
    if not all(part.isidentifier() for part in given.split(".")) or not module_name:
        raise ConfigError(
            f"{where}: {given!r} is not the dotted path of a function, such as package.module.name."
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but not one that it imports
        raise ConfigError(
            f"{where}: cannot import the module {error.name!r}. Put its file next to the YAML file "
            f"or in the working directory, or install it."
        ) from None
    function: Any = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(
            f"{where}: {module_name} has no function {name!r}. {suggest(name, known)}"
        )
    if is_of_standard_library(function) and getattr(function, "__module__", None) != "math":
        raise ConfigError(
            f"{where}: functions of Python's standard library, such as {given}, are not allowed "
            f"here (except from math). Pass your own function of the step."
        )
    return function  # type: ignore[no-any-return]  # its signature is checked when it is called


def is_of_standard_library(target: Any) -> bool:
    """Return whether a class, function or other object belongs to Python's standard library.

    Other objects are judged by their class.
    """
    module = getattr(target, "__module__", None)
    if not isinstance(module, str):
        module = type(target).__module__
    return module.partition(".")[0] in sys.stdlib_module_names
