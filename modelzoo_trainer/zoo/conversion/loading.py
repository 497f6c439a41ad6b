"""Weights of a folder of Hugging Face for a model of this package: a reader of weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from modelzoo_trainer.checkpointing.lazy_tensors import LazyTensor
from modelzoo_trainer.checkpointing.lazy_weights import open_weights
from modelzoo_trainer.checkpointing.weights import holds_weights
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.hugging_face.folders import CONFIG_FILE, weight_files

log = logging.getLogger("modelzoo_trainer.checkpoint")

_KEY: Final = "ckpt_path"
_OF_TRAINING: Final = re.compile(r".*(dropout|pdrop).*|initializer_range|use_cache")
_LENGTHS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")


def read_hugging_face(model: nn.Module, path: Path) -> dict[str, Tensor] | None:
    """Return the tensors of a folder of Hugging Face for a decoder, or `Dpo` with one; unread.

    A `checkpointing.WeightsReader`. None if the names need no translation: for other models, or if
    they are this package's names.

    Raises:
        ConfigError: If the model of the folder has other settings than the model, or is none; if
            the folder has settings, but no weights.
        CheckpointError: If the files are damaged, or do not match config.json.
    """
    from modelzoo_trainer.zoo.models.decoder import (
        Decoder,  # only now: a run may have no such model
    )

    decoder = getattr(model, "policy_model", model)
    is_theirs = (path / CONFIG_FILE).is_file()
    if is_theirs and not holds_weights(path):
        weight_files(path, key=_KEY)  # raises
    folder = path if path.is_dir() else path.parent
    if _is_of_transformers(decoder) and (folder / CONFIG_FILE).is_file():
        _check_theirs(decoder, folder)
    if not is_theirs or not isinstance(decoder, Decoder):
        return None
    if "token_embeddings.weight" in open_weights(path).names():
        return None  # ours, with a config.json beside them
    return _translated(decoder, path)


def _is_of_transformers(model: Any) -> bool:
    """Return whether a model is one of `transformers`, or contains one: `hf_causal_lm`."""
    config = getattr(model, "config", None)
    return hasattr(config, "model_type") and hasattr(config, "get_text_config")


def _check_theirs(model: Any, folder: Path) -> None:
    """Refuse a folder of a model of `transformers` with other settings than the run's model."""
    from modelzoo_trainer.zoo.models.hugging_face.folder_settings import check_folder

    settings = getattr(model, "settings", None)  # of hf_causal_lm and hf_model
    check_folder(model.config, folder, getattr(settings, "config_overrides", None))


def _translated(decoder: Any, folder: Path) -> dict[str, Tensor]:
    from modelzoo_trainer.zoo.conversion.hugging_face import Import, aliases_of, plan_import

    found: Import = plan_import(folder, key=_KEY)
    _check_settings(decoder, found, folder)
    plan, weights = found.plan, found.weights

    def rows_of(name: str) -> Callable[[int, int], Tensor] | None:
        original = plan.original_of(name)
        if original is None:
            return None
        return lambda start, stop: weights.read_rows(original, start, stop)

    def lazy(name: str) -> LazyTensor:
        return LazyTensor(
            plan.shape(name), plan.dtype(name), lambda: plan.read(name), rows_of(name)
        )

    state: dict[str, Tensor] = {name: lazy(name) for name in plan.names()}
    for alias, name in aliases_of(decoder).items():
        state[alias] = lazy(name)
    log.info("Translating the weights of %s from the names of %s.", folder, found.family.name)
    return state


def _check_settings(decoder: Any, found: Any, folder: Path) -> None:
    """Refuse the first setting of config.json that differs from the model's."""
    where = f"{_KEY}: {str(folder / CONFIG_FILE)!r}"
    try:
        own = found.family.make_config(decoder)
    except ConfigError as error:
        raise ConfigError(
            f"{where} is a model of the family {found.family.name}, which the model of this run is "
            f"not: {error} Use the settings of config.json: modelzoo-trainer checkpoint convert "
            f"{folder} DIR --from hf writes them to DIR/model.yaml."
        ) from None
    given = found.family.make_config(found.settings)
    ignored = () if decoder.position_embedding_type == "learned" else _LENGTHS
    for key in given.keys() | own.keys():
        if _OF_TRAINING.fullmatch(key) or key in ignored or given.get(key) == own.get(key):
            continue
        name, there, here = _difference(found.settings, decoder) or (
            key,
            given.get(key),
            own.get(key),
        )
        raise ConfigError(
            f"{where}: the model of this run has {name}: {here}, but the weights belong to a "
            f"model with {there}. Use the settings of config.json: modelzoo-trainer checkpoint "
            f"convert {folder} DIR --from hf writes them to DIR/model.yaml."
        )


_NOT_COMPARED: Final = re.compile(
    r".*(dropout|initializer).*|loss_.*|compute_eval_metrics|attention_(kernel|softmax_fp32)"
    r"|fold_rope_consts|mixed_precision|fp16_type|max_position_embeddings"
)


def _difference(given: Any, own: Any) -> tuple[str, Any, Any] | None:
    """Return the first setting that differs, with both values."""
    for field in fields(type(given)):
        there, here = getattr(given, field.name), getattr(own, field.name)
        if there != here and not _NOT_COMPARED.fullmatch(field.name):
            return field.name, there, here
    return None
