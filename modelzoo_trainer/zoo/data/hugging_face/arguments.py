"""The arguments of the data processor, sorted by what they are for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hugging_face.encoding import EncodingSettings
from modelzoo_trainer.zoo.data.hugging_face.examples import Columns, Task
from modelzoo_trainer.zoo.data.hugging_face.source import OWNER, DatasetSource

_LANGUAGE: Final = ("text", "chat", "instruction")
_TOKENIZED: Final = (*_LANGUAGE, "preference", "classification")
_USED_BY: Final[Mapping[str, tuple[Task, ...]]] = {
    "text_column": ("text", "classification"),
    "text_pair_column": ("classification",),
    "label_column": ("classification",),
    "label_names": ("classification",),
    "messages_column": ("chat",),
    "message_role_key": ("chat", "preference"),
    "message_content_key": ("chat", "preference"),
    "prompt_column": ("instruction", "preference"),
    "response_column": ("instruction",),
    "chosen_column": ("preference",),
    "rejected_column": ("preference",),
    "packing": _LANGUAGE,
    "separator": ("instruction",),
    "truncation": ("chat", "instruction"),
    "min_sequence_length": _LANGUAGE,
    "max_prompt_length": ("preference",),
    "feature_columns": ("features",),
    "padding": ("features",),
    "image_size": ("features",),
    "image_channels": ("features",),
    "image_mean": ("features",),
    "image_std": ("features",),
    "image_processor": ("features",),
    "tokenizer": _TOKENIZED,
    "max_sequence_length": _TOKENIZED,
    "eos_token": _TOKENIZED,
    "pad_token": _TOKENIZED,
    "vocab_size": _TOKENIZED,
    "chat_template": ("chat", "instruction", "preference"),
}


def check_use(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Check that all arguments have an effect with the task, and that a tokenizer is given.

    Args:
        given: All arguments by name.
        defaults: Those that a call may omit.

    Raises:
        ConfigError: If one that is not at its default has none, or the tokenizer is missing.
    """
    task = given["task"]
    for key, tasks in _USED_BY.items():
        if task not in tasks and given[key] != defaults[key]:
            raise ConfigError(
                f"{OWNER}.{key} has no effect with task {task}, only with "
                f"{', '.join(tasks)}. Remove it, or set task."
            )
    if task in _TOKENIZED and given["tokenizer"] is None:
        raise ConfigError(f"{OWNER}.tokenizer is missing, which task {task} requires. Set it.")
    if given["separator"] != defaults["separator"] and given["chat_template"] is not None:
        raise ConfigError(
            f"{OWNER}.separator has no effect with chat_template, which separates a prompt from "
            f"its response. Remove one of them."
        )


def source_of(given: Mapping[str, Any]) -> DatasetSource:
    """Return where the dataset is."""
    names = [field.name for field in fields(DatasetSource)]
    return DatasetSource(**{name: given[name] for name in names if name in given})


def encoding_settings(given: Mapping[str, Any], chat_template: str | None) -> EncodingSettings:
    """Return how rows are made.

    Args:
        given: All arguments by name.
        chat_template: Text of the template, if the task has one.
    """
    columns = Columns(
        **{
            name: given[name if name in given else f"{name}_column"]
            for name in (field.name for field in fields(Columns))
        }
    )
    names = {field.name for field in fields(EncodingSettings)} - {"columns", "chat_template"}
    return EncodingSettings(
        columns=columns,
        chat_template=chat_template,
        **{name: given[name] for name in names},
    )
