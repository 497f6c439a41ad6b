"""Read hooks: from an entry of a file to the turns of a document.

A hook is a function `hook(entry, **read_hook_kwargs)`. The published names are those of the
functions here; any other path is imported.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from modelzoo_trainer.config.names import import_module
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.preprocessing.interface import Entry, SemanticData
from modelzoo_trainer.preprocessing.turns import turns_of

_PUBLISHED: Final = re.compile(
    r"(?:cerebras\.)?modelzoo\..*\bhooks|modelzoo_trainer\.preprocessing\.hooks"
)
"""Modules whose functions are those of this module."""
_NOT_SUPPORTED: Final = {
    "pretraining_image_captions_hook",
    "finetuning_image_captions_hook",
    "finetuning_llava_hook",
    "finetuning_llava_hook_prompt_completion",
}


def text_read_hook(entry: Entry, *, text_key: str) -> SemanticData:
    """Return one text, stripped of white space at both ends."""
    return [{"content": [{"text": _text(entry, text_key).strip()}]}]


def nlg_read_hook(entry: Entry, *, context_key: str, completion_key: str) -> SemanticData:
    """Return a context and its completion, both as token ids."""
    return [
        {"type": "context", "content": [{"text": _value(entry, context_key)}]},
        {"type": "completion", "content": [{"text": _value(entry, completion_key)}]},
    ]


def prompt_completion_text_read_hook(
    entry: Entry, *, prompt_key: str, completion_key: str
) -> SemanticData:
    """Return a prompt and its completion."""
    return _pair(entry, ("prompt", prompt_key), ("completion", completion_key))


def prompt_completion_chat_read_hook(
    entry: Entry, *, prompt_key: str, completion_key: str
) -> SemanticData:
    """Return the message of a user and the answer of the assistant."""
    return _pair(entry, ("user", prompt_key), ("assistant", completion_key))


def chat_read_hook(
    entry: Entry,
    *,
    multi_turn_key: str,
    multi_turn_role_key: str,
    multi_turn_content_key: str,
) -> SemanticData | None:
    """Return the messages of a chat: an optional system message, then pairs of user and assistant.

    Returns None, so that the document is skipped, if the messages are no pairs.
    """
    messages = _value(entry, multi_turn_key)
    if not isinstance(messages, list | tuple) and not hasattr(messages, "tolist"):
        raise ConfigError(
            f"{multi_turn_key!r} must hold a list of messages, got {type(messages).__name__}."
        )
    array = [
        {
            "type": _ROLES.get(role := _text(message, multi_turn_role_key), role),
            "content": [{"text": _text(message, multi_turn_content_key)}],
        }
        for message in messages
    ]
    roles = [turn["type"] for turn in array]
    pairs = roles[1:] if roles[:1] == ["system"] else roles
    is_paired = bool(pairs) and pairs == ["user", "assistant"] * (len(pairs) // 2)
    return array if is_paired else None


_ROLES: Final = {"human": "user", "gpt": "assistant"}  # as ShareGPT names them


def dpo_read_hook(
    entry: Entry,
    *,
    chosen_key: str,
    rejected_key: str,
    prompt_key: str | None = None,
    assistant_role: str = "assistant:",
) -> SemanticData:
    """Return a prompt with the chosen and the rejected answer.

    Without `prompt_key`, both texts contain the prompt: it ends with the last `assistant_role`, in
    upper or lower case.
    """
    chosen, rejected = _text(entry, chosen_key), _text(entry, rejected_key)
    if prompt_key is not None:
        prompt = _text(entry, prompt_key)
    else:
        prompt, chosen = _split_after_last(chosen, assistant_role, chosen_key)
        _, rejected = _split_after_last(rejected, assistant_role, rejected_key)
    parts = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return [{"type": role, "content": [{"text": text}]} for role, text in parts.items()]


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
    given = dict(arguments or {})
    _check_arguments(function, given, path)
    return ReadHook(path, function, given)


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


def _pair(entry: Entry, *parts: tuple[str, str]) -> SemanticData:
    return [{"type": role, "content": [{"text": _text(entry, key)}]} for role, key in parts]


def _value(entry: Entry, key: str) -> Any:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"an object with {key!r} is expected, got {type(entry).__name__}.")
    if key not in entry:
        raise ConfigError(f"there is no key {key!r}. {suggest(key, entry)}")
    return entry[key]


def _text(entry: Entry, key: str) -> str:
    value = _value(entry, key)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return str(value)
    raise ConfigError(f"{key!r} must hold text, got {type(value).__name__}.")


def _split_after_last(text: str, mark: str, key: str) -> Sequence[str]:
    found = list(re.finditer(re.escape(mark), text, re.IGNORECASE))
    if not found:
        raise ConfigError(
            f"{key!r} has no {mark!r}, which ends the prompt. Set read_hook_kwargs.assistant_role, "
            "or prompt_key if the prompt is a column."
        )
    end = found[-1].end()
    return text[:end], text[end:]
