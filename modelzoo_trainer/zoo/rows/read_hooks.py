"""Functions from an entry of a file to the turns of a document: the published read hooks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.rows.interface import Entry, SemanticData


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
    """Return the message of a user and the answer of the assistant, without white space around."""
    return stripped(_pair(entry, ("user", prompt_key), ("assistant", completion_key)))


def chat_read_hook(
    entry: Entry,
    *,
    multi_turn_key: str,
    multi_turn_role_key: str,
    multi_turn_content_key: str,
) -> SemanticData | None:
    """Return the messages of a chat: an optional system message, then pairs of user and assistant.

    Returns None, so that the document is skipped, if the messages are no pairs. White space around
    texts of user and assistant is removed.
    """
    messages = _value(entry, multi_turn_key)
    if not isinstance(messages, list | tuple) and not hasattr(messages, "tolist"):
        raise ConfigError(
            f"{multi_turn_key!r} must hold a list of messages, got {type(messages).__name__}."
        )
    array = [
        {
            "type": _ROLES.get(role := _text(message, multi_turn_role_key), role),
            "content": [{"text": content_text(message, multi_turn_content_key)}],
        }
        for message in messages
    ]
    if array and array[0] == {"type": "system", "content": [{"text": ""}]}:
        array = array[1:]
    roles = [turn["type"] for turn in array]
    pairs = roles[1:] if roles[:1] == ["system"] else roles
    is_paired = bool(pairs) and pairs == ["user", "assistant"] * (len(pairs) // 2)
    return stripped(array) if is_paired else None


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
    upper or lower case. White space around each of the three is removed.
    """
    chosen, rejected = _text(entry, chosen_key), _text(entry, rejected_key)
    if prompt_key is not None:
        prompt = _text(entry, prompt_key)
    else:
        prompt, chosen = _split_after_last(chosen, assistant_role, chosen_key)
        _, rejected = _split_after_last(rejected, assistant_role, rejected_key)
    parts = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return [{"type": role, "content": [{"text": text.strip()}]} for role, text in parts.items()]


def stripped(turns: SemanticData) -> SemanticData:
    """Return turns of one text each, without white space around it, except system messages."""
    return [
        turn
        if turn["type"] == "system"
        else {**turn, "content": [{"text": turn["content"][0]["text"].strip()}]}
        for turn in turns
    ]


def content_text(message: Entry, key: str) -> str:
    """Return the content of a message: a text, or a list of parts `{type: text, text: ...}`.

    Raises:
        ConfigError: If there is no such key, or a part is not text.
    """
    value = _value(message, key)
    parts = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(parts, list | tuple):
        return _text(message, key)
    kinds = [part.get("type", "text") if isinstance(part, Mapping) else None for part in parts]
    if other := next((kind for kind in kinds if kind != "text"), ""):
        raise ConfigError(
            f"{key!r} has a part of the type {other!r}; only parts with {{'type': 'text', "
            "'text': ...} can be used. Remove the document, or the part."
        )
    if None in kinds:
        raise ConfigError(f"the parts in {key!r} must be objects with 'type' and 'text'.")
    return "".join(_text(part, "text") for part in parts)


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
    if value is None or value != value:  # NaN, a missing value of a table
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
