"""Read hooks: from an entry of a file to the turns of a document.

A hook is a function `hook(entry, **read_hook_kwargs)`. The published names are the names of the
functions here; any other path is imported.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from modelzoo_trainer.base.user_modules import import_module
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.rows.interface import Entry, SemanticData
from modelzoo_trainer.zoo.rows.read_hooks import (
    chat_read_hook,
    dpo_read_hook,
    nlg_read_hook,
    prompt_completion_chat_read_hook,
    prompt_completion_text_read_hook,
    text_read_hook,
)
from modelzoo_trainer.zoo.rows.turns import turns_of

_PUBLISHED: Final = re.compile(
    r"(?:cerebras\.)?modelzoo\..*\bhooks|modelzoo_trainer\.preprocessing\.hooks"
)
"""Modules with the same functions as this module."""
_OLDER: Final = "data_keys"
_NOT_SUPPORTED: Final = {
    "pretraining_image_captions_hook",
    "finetuning_image_captions_hook",
    "finetuning_llava_hook",
    "finetuning_llava_hook_prompt_completion",
}


class ReadHookError(RuntimeError):
    """A user's read hook has raised an exception; the message names the document."""


HOOKS: Final[dict[str, Callable[..., Any]]] = {
    function.__name__: function
    for function in (
        text_read_hook,
        nlg_read_hook,
        prompt_completion_text_read_hook,
        prompt_completion_chat_read_hook,
        chat_read_hook,
        dpo_read_hook,
    )
}


@dataclass(frozen=True, slots=True)
class ReadHook:
    """A hook with its arguments."""

    path: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    def __call__(self, entry: Entry) -> SemanticData | None:
        """Return the semantic data of an entry; None if it is to be skipped.

        Args:
            entry: The columns of a file's row, or the keys of a line of JSON.

        Raises:
            ConfigError: If a key is missing, or the hook returns something else. Exceptions of a
                user's function propagate.
        """
        try:
            returned = self.function(entry, **self.arguments)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from error
        return list(returned) if turns_of(returned, self.path) else None

    @property
    def columns(self) -> list[str]:
        """The names in the arguments that end in `_key`, of columns of the input."""
        return [
            str(name)
            for key, name in self.arguments.items()
            if key.endswith("_key") and name is not None
        ]


def find_hook(path: str, arguments: Mapping[str, Any] | None) -> ReadHook:
    """Return the hook for `processing.read_hook` and `processing.read_hook_kwargs`.

    Args:
        path: `module:function`; the published modules stand for the functions here.
        arguments: Arguments of the function besides the entry.

    Raises:
        ConfigError: If there is no such function, or the arguments do not fit it.
    """
    module, separator, name = path.partition(":")
    if not separator:
        module, _, name = path.rpartition(".")
        fix = f"{module}:{name}" if module else "module:function"
        raise ConfigError(f"processing.read_hook: {path!r} has no colon. Write {fix!r}.")
    function = _published(name, path) if _PUBLISHED.fullmatch(module) else _imported(module, name)
    given = _flat(arguments or {})
    _check_arguments(function, given, path)
    return ReadHook(path, function, given)


def _flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments without the level `data_keys` that older published files have."""
    rest = dict(arguments)
    keys = rest.get(_OLDER)
    if not isinstance(keys, Mapping):
        return rest
    del rest[_OLDER]
    twice = [key for key in keys if key in rest]
    if twice:
        raise ConfigError(
            f"processing.read_hook_kwargs.{_OLDER}.{twice[0]}: {twice[0]} is given twice. Remove "
            f"one of them."
        )
    return {**keys, **rest}


def _published(name: str, path: str) -> Callable[..., Any]:
    if name in _NOT_SUPPORTED:
        raise ConfigError(f"processing.read_hook: {path!r} reads images, which is not supported.")
    if name not in HOOKS:
        raise ConfigError(f"processing.read_hook: there is no {path!r}. {suggest(name, HOOKS)}")
    return HOOKS[name]


def _imported(module_name: str, name: str) -> Callable[..., Any]:
    try:
        module = import_module(module_name, "Write module:function.")
    except ConfigError as error:
        raise ConfigError(f"processing.read_hook: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(
            f"processing.read_hook: {module_name} has no function {name!r}. {suggest(name, known)}"
        )
    return function  # type: ignore[no-any-return]  # a user's


def _check_arguments(function: Callable[..., Any], given: Mapping[str, Any], path: str) -> None:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return  # it reads them itself
    known = {one.name: one for one in parameters}
    for key in given:
        if key not in known:
            raise ConfigError(
                f"processing.read_hook_kwargs.{key}: no argument of {path!r}. {suggest(key, known)}"
            )
        if key.endswith("_key") and not isinstance(given[key], str | None):
            raise ConfigError(
                f"processing.read_hook_kwargs.{key}: expected the name of a column, got "
                f"{given[key]!r}. Put it in quotes if it is the name."
            )
    missing = [key for key, one in known.items() if one.default is one.empty and key not in given]
    if missing:
        raise ConfigError(
            f"processing.read_hook_kwargs: {', '.join(missing)} of {path!r} is missing. Give the "
            "name of the column in the input."
        )
