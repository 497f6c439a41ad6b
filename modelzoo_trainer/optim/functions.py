"""Functions of the user's, by their dotted paths."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from modelzoo_trainer.errors import ConfigError, suggest


def function_at(
    where: str, given: str | Callable[[int], float] | None
) -> Callable[[int], float] | None:
    """Return a function, imported if a path was given.

    Raises:
        ConfigError: If there is no such module or function, or it is of Python's standard library
            and not of `math`. What goes wrong inside the module is raised as it is.
    """
    if given is None or callable(given):
        return given
    module_name, _, name = given.rpartition(".")
    if not all(part.isidentifier() for part in given.split(".")) or not module_name:
        raise ConfigError(
            f"{where}: {given!r} is not the path of a function; write package.module.name."
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; one that it imports is not
        raise ConfigError(f"{where}: there is no module {error.name!r}.") from None
    function: Any = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(
            f"{where}: {module_name} has no function {name!r}. {suggest(name, known)}"
        )
    if is_of_standard_library(function) and getattr(function, "__module__", None) != "math":
        raise ConfigError(
            f"{where}: {given} is of Python's standard library. Write a function of your own that "
            f"takes the step."
        )
    return function  # type: ignore[no-any-return]  # what it takes and returns shows when called


def is_of_standard_library(target: Any) -> bool:
    """Return whether a class, function or other object is of Python itself.

    Of an object that is none of both, the class counts.
    """
    module = getattr(target, "__module__", None)
    if not isinstance(module, str):
        module = type(target).__module__
    return module.partition(".")[0] in sys.stdlib_module_names
