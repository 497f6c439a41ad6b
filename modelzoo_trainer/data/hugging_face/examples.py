"""From rows of a dataset to the turns of documents: what each task reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.token_rows.interface import SemanticData
from modelzoo_trainer.token_rows.read_hooks import (
    chat_read_hook,
    prompt_completion_chat_read_hook,
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
}


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
        """Return the turns of a row; None if its messages are not pairs of user and assistant.

        Raises:
            ConfigError: If a column has another type, or a role is not known.
        """
        columns = self.columns
        if self.task == "chat":
            return self._chat(row)
        if self.task == "preference":
            return self._preference(row)
        if self.task == "instruction":
            read = (
                prompt_completion_chat_read_hook
                if self.is_chat
                else prompt_completion_text_read_hook
            )
            return read(row, prompt_key=columns.prompt, completion_key=columns.response)
        return text_read_hook(row, text_key=columns.text)

    def _chat(self, row: Mapping[str, Any]) -> SemanticData | None:
        columns = self.columns
        messages = row[columns.messages]
        if messages is None:
            return None
        for message in messages if isinstance(messages, list) else ():
            self._role(message, columns.messages)
        return chat_read_hook(
            row,
            multi_turn_key=columns.messages,
            multi_turn_role_key=columns.message_role_key,
            multi_turn_content_key=columns.message_content_key,
        )

    def _preference(self, row: Mapping[str, Any]) -> SemanticData:
        columns = self.columns
        prompts: list[str | None] = []
        if columns.prompt in row:
            of_user, text = self._exchange(row, columns.prompt)
            prompts.append(text if of_user is None else of_user)
        answers = []
        for column in (columns.chosen, columns.rejected):
            of_user, text = self._exchange(row, column)
            if text is None:
                raise ConfigError(f"column {column!r} has no message of the assistant.")
            answers.append(text)
            if columns.prompt not in row:
                prompts.append(of_user)
        if None in prompts:
            raise ConfigError(
                f"there is no prompt: neither a column {columns.prompt!r}, nor a message of the "
                f"user in {columns.chosen!r} and {columns.rejected!r}. Set prompt_column."
            )
        if len(set(prompts)) > 1:
            raise ConfigError(
                f"the columns {columns.chosen!r} and {columns.rejected!r} begin with different "
                f"messages of the user. Both must answer the same prompt."
            )
        parts = zip(("prompt", "chosen", "rejected"), (prompts[0], *answers), strict=True)
        return [{"type": role, "content": [{"text": text}]} for role, text in parts]

    def _exchange(self, row: Mapping[str, Any], column: str) -> tuple[str | None, str | None]:
        """Return the texts of the user and of the assistant in a column: a text, or messages."""
        value = row[column]
        if value is None or isinstance(value, str):
            return None, value or ""
        if not isinstance(value, list):
            raise ConfigError(
                f"column {column!r} must have a text or a list of messages, got "
                f"{type(value).__name__}."
            )
        roles = [self._role(one, column) for one in value]
        if roles not in (["user"], ["assistant"], ["user", "assistant"]):
            raise ConfigError(
                f"column {column!r} has messages of the roles {', '.join(roles) or 'none'}; only "
                f"one of the user and one of the assistant can be used for preferences."
            )
        texts = [str(one[self.columns.message_content_key]) for one in value]
        return (
            texts[0] if roles[0] == "user" else None,
            texts[-1] if roles[-1] == "assistant" else None,
        )

    def _role(self, message: Any, column: str) -> str:
        key = self.columns.message_role_key
        if not isinstance(message, Mapping) or key not in message:
            there = ", ".join(message) if isinstance(message, Mapping) else type(message).__name__
            raise ConfigError(
                f"a message in column {column!r} has no {key!r}; it has: {there}. Set "
                f"message_role_key and message_content_key."
            )
        role = message[key]
        if role not in _ROLES:
            raise ConfigError(
                f"a message in column {column!r} has the role {role!r}; known roles: "
                f"{', '.join(_ROLES)}. Change the role, or remove the message."
            )
        return _ROLES[role]
