"""From rows of a dataset to the turns of documents: what each task reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.interface import SemanticData
from modelzoo_trainer.zoo.rows.read_hooks import (
    content_text,
    prompt_completion_text_read_hook,
    text_read_hook,
)

Task = Literal["text", "chat", "instruction", "preference", "classification", "features"]

_ROLES: Final = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "human": "user",
    "gpt": "assistant",
    "tool": "tool",
}


_BESIDE_TEXT: Final = ("tool_calls", "function_call", "reasoning_content", "thinking")


class _Answer(NamedTuple):
    """An answer, and role and text of the messages before it."""

    before: list[tuple[str, str]]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns that a task reads, and the keys of a message."""

    text: str = "text"
    text_pair: str | None = None
    label: str = "label"
    messages: str = "messages"
    message_role_key: str = "role"
    message_content_key: str = "content"
    prompt: str = "prompt"
    response: str = "response"
    chosen: str = "chosen"
    rejected: str = "rejected"

    def of(self, task: Task) -> dict[str, str]:
        """Return the columns of a task by the argument that names each."""
        names: dict[Task, tuple[str, ...]] = {
            "text": ("text",),
            "chat": ("messages",),
            "instruction": ("prompt", "response"),
            "preference": ("chosen", "rejected"),
            "classification": ("text", "text_pair", "label"),
            "features": (),
        }
        found = {f"{name}_column": getattr(self, name) for name in names[task]}
        return {key: name for key, name in found.items() if name is not None}


@dataclass(frozen=True, slots=True)
class ReadTurns:
    """Reads a row of the dataset.

    Args:
        task: What the rows are.
        columns: Where it is in them.
        is_chat: For instructions: whether they are the messages of a user and the assistant.
    """

    task: Task
    columns: Columns
    is_chat: bool = False

    def __call__(self, row: Mapping[str, Any]) -> SemanticData | None:
        """Return the turns of a row; None if it has no messages.

        Raises:
            ConfigError: If a column has another type, or a role is not known.
        """
        columns = self.columns
        if self.task == "chat":
            return self._chat(row)
        if self.task == "preference":
            return self._preference(row)
        if self.task == "instruction":
            keys = {"prompt_key": columns.prompt, "completion_key": columns.response}
            turns = prompt_completion_text_read_hook(row, **keys)
            roles = ("user", "assistant") if self.is_chat else ("prompt", "completion")
            return [turn | {"type": role} for turn, role in zip(turns, roles, strict=True)]
        return text_read_hook(row, text_key=columns.text)

    def _chat(self, row: Mapping[str, Any]) -> SemanticData | None:
        """Return the messages in any order; the chat template decides which it takes."""
        column = self.columns.messages
        messages = [] if row[column] is None else _listed(row[column], column)
        turns = []
        for message in messages:
            role, text = self._message(message, column)
            rest = self._rest(message, role)
            if role != "system" or text.strip():
                turn = {"type": role, "content": [{"text": text}]}
                turns.append(turn if rest is None else turn | {"message": rest})
        return turns or None

    def _preference(self, row: Mapping[str, Any]) -> SemanticData:
        """Return the turns of the prompt, then the chosen and the rejected answer.

        Messages before the answers replace the column of the prompt.
        """
        columns = self.columns
        chosen, rejected = (self._answer(row, one) for one in (columns.chosen, columns.rejected))
        if chosen.before != rejected.before:
            raise ConfigError(
                f"the columns {columns.chosen!r} and {columns.rejected!r} begin with different "
                f"messages. Both must answer the same prompt."
            )
        prompt = chosen.before
        if not prompt and columns.prompt not in row:
            raise ConfigError(
                f"there is no prompt: neither a column {columns.prompt!r}, nor a message of the "
                f"user in {columns.chosen!r} and {columns.rejected!r}. Set prompt_column."
            )
        if not prompt:
            value = row[columns.prompt]
            is_text = value is None or isinstance(value, str)
            prompt = [("user", value or "")] if is_text else self._messages(value, columns.prompt)
        turns = [*prompt, ("chosen", chosen.text), ("rejected", rejected.text)]
        return [{"type": role, "content": [{"text": text}]} for role, text in turns]

    def _answer(self, row: Mapping[str, Any], column: str) -> _Answer:
        """Return the answer in a column, a text or messages."""
        value = row[column]
        if value is None or isinstance(value, str):
            return _Answer([], value or "")
        *before, (role, text) = self._messages(value, column) or [("", "")]
        if role != "assistant":
            raise ConfigError(
                f"column {column!r} must end with a message of the assistant, got "
                f"{role or 'no message'}. Remove the row, or what follows the answer."
            )
        return _Answer(before, text)

    def _messages(self, value: Any, column: str) -> list[tuple[str, str]]:
        """Return role and text of messages, without system messages that are empty."""
        found = []
        for message in _listed(value, column):
            beside = next((key for key in _BESIDE_TEXT if _has(message, key)), None)
            if beside is not None:
                raise ConfigError(
                    f"a message in column {column!r} has {beside!r}, which would not be learned. "
                    f"Write it into the text of the message, or remove the row."
                )
            found.append(self._message(message, column))
        return [(role, text) for role, text in found if role != "system" or text.strip()]

    def _message(self, message: Any, column: str) -> tuple[str, str]:
        keys = self.columns.message_role_key, self.columns.message_content_key
        there = message if isinstance(message, Mapping) else {}
        missing = [key for key in keys if key not in there]
        if missing:
            has = ", ".join(there) or type(message).__name__
            raise ConfigError(
                f"a message in column {column!r} has no {missing[0]!r}; it has: {has}. Set "
                f"message_role_key and message_content_key."
            )
        role = message[keys[0]]
        if not isinstance(role, str) or role not in _ROLES:
            raise ConfigError(
                f"a message in column {column!r} has the role {role!r}; known roles: "
                f"{', '.join(_ROLES)}. Change the role, or remove the message."
            )
        return _ROLES[role], content_text(message, keys[1])

    def _rest(self, message: Mapping[str, Any], role: str) -> dict[str, Any] | None:
        """Return what a message has besides role and text, for the template; None = nothing."""
        if role != "tool" and not any(message.get(key) for key in _BESIDE_TEXT):
            return None
        columns = self.columns
        keys = columns.message_role_key, columns.message_content_key, "role", "content"
        return {
            key: _without_none(value)
            for key, value in message.items()
            if key not in keys and value is not None
        }


def _listed(value: Any, column: str) -> list[Any]:
    """Return a list of messages."""
    is_lists = isinstance(value, Mapping) and all(isinstance(one, list) for one in value.values())
    if is_lists:  # a feature `Sequence` of objects is an object of lists
        value = [dict(zip(value, one, strict=True)) for one in zip(*value.values(), strict=False)]
    if not isinstance(value, list):
        raise ConfigError(
            f"column {column!r} must have a list of messages, got {type(value).__name__}. "
            f"Choose another column, or another task."
        )
    return value


def _has(message: Any, key: str) -> bool:
    """Return whether a message has a value of a key."""
    return isinstance(message, Mapping) and bool(message.get(key))


def _without_none(value: Any) -> Any:
    """Return a value without the keys that a table adds to objects that lack them."""
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value
