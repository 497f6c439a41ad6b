"""Whether a folder of weights is of a model with the settings of the model of a run."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.hugging_face.folders import CONFIG_FILE, read_config, transformers_library
from modelzoo_trainer.zoo.models.hugging_face.overrides import overridden, reason_of_library

log = logging.getLogger("modelzoo_trainer.checkpoint")

_KEY: Final = "ckpt_path"
_MAX_NAMED: Final = 4
_WITHOUT_EFFECT: Final = re.compile(
    # of training, and of what is returned
    r".*(dropout|pdrop|drop_path|drop_rate|layerdrop|initializer|jitter_noise).*|init_std"
    r"|use_cache|output_.*|return_dict|router_(aux|z)_loss_coef|gradient_checkpointing"
    r"|chunk_size_feed_forward|pretraining_tp|problem_type|num_labels|id2label.*|label2id.*"
    # names; n_inner is in the shapes
    r"|_.*|architectures|transformers_version|(torch_)?dtype|tokenizer_class|n_inner"
    r"|task_specific_params.*|finetuning_task|auto_map.*|(bos|eos|sep|cls)_token_id"
)
_LENGTHS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
_BY_LENGTH: Final = ("dynamic", "yarn", "longrope")
"""Kinds of rotary positions that depend on the length; in learned ones it is in the shapes."""


def check_folder(config: Any, folder: Path, changes: Mapping[str, Any] | None) -> None:
    """Refuse a folder whose settings are not a model's, although all shapes may fit.

    Args:
        config: The settings of the model, of `transformers`.
        folder: The folder, with `config.json`.
        changes: Settings that a user changes on purpose: `config_overrides`.

    Raises:
        ConfigError: If settings differ that change the outputs.
    """
    where = f"{_KEY}: {str(folder / CONFIG_FILE)!r}"
    given = read_config(folder, key=_KEY)
    theirs = _settings_of(config, given, where)
    if theirs is None:
        return
    intended = _differences(config, theirs)
    if not intended:
        return
    differ = _differences(config, overridden(theirs, given, changes)) if changes else intended
    if not differ:
        log.info("%s has other settings than config_overrides: %s.", where, _named(intended))
        return
    raise ConfigError(
        f"{where} has other settings than the model of this run, with which its weights compute "
        f"something else: {_named(differ)}. Use the same settings, or "
        f"pretrained_model_name_or_path: {folder}; what is to change on purpose belongs in "
        f"config_overrides."
    )


def _settings_of(config: Any, given: Mapping[str, Any], where: str) -> Any:
    """Return the settings in a `config.json`; None if the library cannot read them."""
    kind = given.get("model_type")
    known = transformers_library(_KEY).CONFIG_MAPPING
    if kind == config.model_type:
        cls = type(config)
    elif kind in known:
        cls = known[kind]
    else:
        log.warning("%s has no model_type of transformers, so its settings are not checked.", where)
        return None
    try:
        theirs = cls.from_dict(dict(given))
    except Exception as error:  # of several classes of the library
        raise ConfigError(
            f"{where}: transformers rejects it: {reason_of_library(error)}. Correct the file."
        ) from error
    inner = theirs.get_text_config()
    theirs = inner if inner.model_type == config.model_type else theirs
    if theirs.model_type != config.model_type:
        raise ConfigError(
            f"{where} is of the architecture {theirs.model_type!r}, but the model of this run is "
            f"{config.model_type!r}. Use the same, or another ckpt_path."
        )
    return theirs


def _differences(own: Any, theirs: Any) -> dict[str, tuple[Any, Any]]:
    """Return the values there and here of the settings that differ and change the outputs."""
    here, there = _flat(own.to_dict()), _flat(theirs.to_dict())
    depends = any(one in json.dumps(here | there, default=str) for one in _BY_LENGTH)
    return {
        key: (there.get(key), here.get(key))
        for key in sorted(here.keys() | there.keys())
        if here.get(key) != there.get(key)
        and not any(_WITHOUT_EFFECT.fullmatch(part) for part in (key, key.rpartition(".")[2]))
        and (depends or key.rpartition(".")[2] not in _LENGTHS)
        and not _is_same_head_dim(key, own, theirs)
    }


def _is_same_head_dim(key: str, *configs: Any) -> bool:
    """Return whether the size of heads in one of the settings follows from the other ones."""
    return key == "head_dim" and len({_head_dim_of(one) for one in configs}) == 1


def _head_dim_of(config: Any) -> Any:
    width, num = (getattr(config, key, None) for key in ("hidden_size", "num_attention_heads"))
    return getattr(config, "head_dim", None) or (width // num if width and num else None)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by names with dots; lists and tuples are the same."""
    found: dict[str, Any] = {}
    for key, one in values.items():
        if isinstance(one, Mapping):
            found |= _flat(one, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = json.loads(json.dumps(one, default=str))
    return found


def _named(differ: Mapping[str, tuple[Any, Any]]) -> str:
    rows = [f"{key} ({there!r} there, {here!r} here)" for key, (there, here) in differ.items()]
    rest = len(rows) - _MAX_NAMED
    return ", ".join(rows[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
