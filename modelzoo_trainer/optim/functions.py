"""Functions of the user's, by their dotted paths."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from modelzoo_trainer.errors import ConfigError, suggest


def function_at(
    where: str, given: str | Callable[[int], float] | None
) -> Callable[[int], float] | None:
    """Return a function, imported if a path was given.

    Args:
        where: The argument, for messages.
        given: A function, `package.module.name`, or None, which is returned.

    Raises:
        ConfigError: If there is no such module or function. What goes wrong inside the module is
            raised as it is.
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
    return function  # type: ignore[no-any-return]  # what it takes and returns shows when called
