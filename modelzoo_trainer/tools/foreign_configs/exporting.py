"""Folders of Hugging Face that files of other libraries write, as a callback."""

from __future__ import annotations

import os
import re
from pathlib import PurePath
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError

_DEFAULT: Final = "hf_{step}"
_FIELD: Final = re.compile(r"\{.*?\}|[{}]")


def export_callback(
    folder: str,
    model_dir: str,
    *,
    steps: int | None = None,
    dtype: str | None = None,
    tokenizer: str | None = None,
    adapters_alone: bool = False,
) -> dict[str, Any]:
    """Return the callback `HuggingFaceCheckpoint`, without arguments that are its defaults.

    Args:
        folder: Path of the folders, with the field `{step}` once.
        model_dir: Of the converted file.
        steps: Write on every n-th step, besides the end; None = at the end only.
        dtype: Of the weights; None = as trained.
        tokenizer: A folder or a name of the Hub; None = the model folder's.
        adapters_alone: Whether only LoRA adapters are written.
    """
    where = PurePath(os.path.relpath(folder, model_dir)).as_posix()
    given = {
        "folder": None if where == _DEFAULT else where,
        "steps": steps,
        "tokenizer": tokenizer,
        "dtype": dtype,
        "merge_adapters": False if adapters_alone else None,
    }
    return {
        "HuggingFaceCheckpoint": {key: one for key, one in given.items() if one is not None},
    }


def folder_name(text: str) -> str | None:
    """Return a name with the field `{batch}` as one of ours; None if it has other fields."""
    name = text.replace("{batch}", "{step}")
    return name if name.count("{step}") == 1 and _FIELD.findall(name) == ["{step}"] else None


def has_field(text: str) -> bool:
    """Return whether a path has a field that is filled during the run."""
    return bool(_FIELD.search(text))


def why_not_exported(model: dict[str, Any]) -> str | None:
    """Return why a decoder cannot be written in the format of Hugging Face; None if it can.

    `model`: the section of the converted file.
    """
    from modelzoo_trainer.zoo.conversion.hugging_face import family_fitting  # they import torch
    from modelzoo_trainer.zoo.models.inner_decoder import decoder_of

    try:
        cls, arguments = decoder_of("model", model)
        family_fitting(cls.settings_of(**arguments))
    except ConfigError as error:
        return str(error)
    return None
