"""Folders of adapters as `peft` writes them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.lazy_weights import SINGLE
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.conversion.adapters import LoraLayer
from modelzoo_trainer.zoo.conversion.engine import PartOf, TensorSource
from modelzoo_trainer.zoo.conversion.tokenizer_files import GENERATION, TokenizerFiles
from modelzoo_trainer.zoo.conversion.transformers_model import FSDP, TheirModel
from modelzoo_trainer.zoo.conversion.weights_folder import (
    TensorSpec,
    new_folder,
    num_bytes_of,
    write_tensors,
)
from modelzoo_trainer.zoo.models.hugging_face.adapters import (
    PlainNames,
    check_peft,
    keeps_weights,
)

_FILE: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_NO_LIMIT: Final = 1 << 62
_INSTEAD: Final = "Merge them, which is the default."


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterExport:
    """A folder of adapters: planned, not written.

    Attributes:
        settings: The content of adapter_config.json, an object of `peft`.
        names: The name in the source of each tensor of the file.
        source: The tensors.
        specs: Of the tensors of the file.
    """

    settings: Any
    names: Mapping[str, str]
    source: TensorSource
    specs: Mapping[str, TensorSpec]


def adapter_settings(model: TheirModel, layers: Mapping[str, LoraLayer]) -> Any:
    """Return what adapter_config.json will have, as an object of `peft`.

    Args:
        model: The model with adapters.
        layers: These, by the name of the layer.

    Raises:
        ConfigError: If there are none, or the model without them is not in a folder or on the Hub.
    """
    if not layers:
        raise ConfigError(
            f"merge_adapters is false, but {type(model.module).__name__} has no adapters. "
            f"{_INSTEAD}"
        )
    base, revision = _base_of(model)
    settings = _settings_of(model, layers)
    if settings.bias != "none":
        raise ConfigError(
            f"merge_adapters: false does not write the biases that peft_config.bias: "
            f"{settings.bias!r} trains. {_INSTEAD}"
        )
    if not keeps_weights(getattr(settings, "init_lora_weights", True)):
        raise ConfigError(
            f"merge_adapters: false writes adapters alone, but peft_config.init_lora_weights: "
            f"{settings.init_lora_weights!r} has changed the weights that they were added to. "
            f"{_INSTEAD}"
        )
    settings.base_model_name_or_path = base
    settings.revision = revision
    settings.inference_mode = True
    if settings.task_type is None:  # as peft: the class that the Auto classes make
        cls = type(model.module)
        settings.auto_mapping = {
            "base_model_class": cls.__name__.removeprefix(FSDP),
            "parent_library": cls.__module__,
        }
    return settings


def _base_of(model: TheirModel) -> tuple[str, str | None]:
    """Return the folder or name of the model without adapters, and its revision."""
    revision = None
    if model.wrapper is None:
        base = getattr(model.module, "name_or_path", "")
    else:
        given = model.wrapper.settings
        base, revision = given.pretrained_model_name_or_path or "", given.revision
        if base and not given.has_weights:
            base = ""
        if given.config_overrides:
            raise ConfigError(
                f"merge_adapters: false writes adapters alone, but the model in {base!r} does not "
                f"have the settings in config_overrides. {_INSTEAD}"
            )
    if not base:
        raise ConfigError(
            f"merge_adapters: false writes adapters alone, but {type(model.module).__name__} did "
            f"not start from the weights of a folder or of the Hub, to which they could be added. "
            f"{_INSTEAD}"
        )
    path = Path(base).expanduser()
    return (str(path.resolve()) if path.exists() else str(base)), revision


def _settings_of(model: TheirModel, layers: Mapping[str, LoraLayer]) -> Any:
    if model.wrapper is not None and model.wrapper.settings.peft_config is not None:
        return check_peft(model.wrapper.settings.peft_config)
    known = getattr(model.module, "peft_config", None)
    names = {layer.adapter for layer in layers.values()}
    if isinstance(known, Mapping) and len(names) == 1 and names <= known.keys():
        return copy.deepcopy(known[names.pop()])
    (first, *_) = layers.values()
    patterns = {re.escape(name): layer for name, layer in layers.items()}
    return check_peft(
        {
            "r": first.r,
            "lora_alpha": first.scaling * first.r,
            "rank_pattern": {name: one.r for name, one in patterns.items()},
            "alpha_pattern": {name: one.scaling * one.r for name, one in patterns.items()},
            "fan_in_fan_out": any(one.is_transposed for one in layers.values()),
            "target_modules": "|".join(patterns),
        }
    )


def plan_adapters(
    source: TensorSource,
    model: TheirModel,
    layers: Mapping[str, LoraLayer],
    *,
    dtype: torch.dtype | None,
) -> AdapterExport:
    """Plan a folder of the adapters of a model of `transformers`.

    Args:
        source: The tensors, by the names of the state of the run.
        model: The model.
        layers: Its adapters, by the name of the layer.
        dtype: Of the weights; None = as trained.

    Raises:
        ConfigError: As `adapter_settings`.
    """
    part = PartOf(source, model.prefix)
    names = PlainNames(part.names())
    adapters = "|".join(sorted({re.escape(one.adapter) for one in layers.values()}))
    ending = re.compile(rf"\.(?:{adapters})(?=\.|$)")
    stored = {
        _PREFIX + names.plain.get(name, ending.sub("", name)): name
        for name in part.names()
        if name in names.added and ".original_module." not in name
    }
    specs = {
        name: TensorSpec(shape=part.shape(own), dtype=dtype or part.dtype(own))
        for name, own in stored.items()
    }
    settings = adapter_settings(model, layers)
    return AdapterExport(settings=settings, names=stored, source=part, specs=specs)


def write_adapters(export: AdapterExport, folder: Path, *, tokenizer: TokenizerFiles) -> None:
    """Write a folder that `PeftModel.from_pretrained` loads: all of it, or nothing.

    Raises:
        CheckpointError: If the folder exists or cannot be written.
    """
    tensors = (
        (name, export.source.read(own).to(export.specs[name].dtype))
        for name, own in export.names.items()
    )
    with new_folder(folder, num_bytes_of(export.specs)) as hidden:
        export.settings.save_pretrained(str(hidden))
        tokenizer.without(GENERATION).write(hidden)
        write_tensors(hidden, export.specs, tensors, shard_bytes=_NO_LIMIT)
        disk.rename(hidden / SINGLE, hidden / _FILE)
