"""The model of a run without values, made from its settings."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import Module

from modelzoo_trainer.base.regular_files import require_files_inside
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.conversion.adapters import LoraLayer, lora_layers, planned_layers
from modelzoo_trainer.zoo.conversion.model_settings import RootSettings
from modelzoo_trainer.zoo.conversion.transformers_model import TheirModel, their_model
from modelzoo_trainer.zoo.hugging_face.folders import SETTINGS_PATTERNS
from modelzoo_trainer.zoo.models.dpo import Dpo
from modelzoo_trainer.zoo.models.hugging_face.settings import FOLDER_KEY
from modelzoo_trainer.zoo.models.registry import model_class

_POLICY: Final = "policy_model"
_WITHOUT_VALUES: Final = ("init_lora_weights", "use_dora")
"""Settings of adapters that are computed from the weights; their tensors have the same names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TheirRun:
    """The model of a run that is one of `transformers`, or has one as its policy.

    Attributes:
        model: It, on `meta`.
        layers: Its adapters, by the name of the layer.
        prefix: What precedes the names of the tensors of the policy in the state of the run.
    """

    model: TheirModel
    layers: Mapping[str, LoraLayer]
    prefix: str


def their_run(settings: RootSettings) -> TheirRun:
    """Make the model of a run that is one of `transformers`.

    Raises:
        ConfigError: If a setting is invalid, the folder that it names is missing, its adapters are
            not plain LoRA, or it would run code that only the checkpoint names.
    """
    with _naming(settings):
        root = _root_of(settings)
        policy: Any = root.policy_model if isinstance(root, Dpo) else root
        prefix = f"{_POLICY}." if isinstance(root, Dpo) else ""
        model = their_model(policy)
        assert model is not None
        layers = lora_layers(model.module)
        layers |= _part_of(planned_layers(root, list(settings.lora)), prefix + model.prefix)
    return TheirRun(model=model, layers=layers, prefix=prefix)


def decoder_layers(settings: RootSettings, prefix: str) -> dict[str, LoraLayer]:
    """Return the adapters of a decoder that is the model of a run, or the policy in it.

    Args:
        settings: The settings of the run's model.
        prefix: What precedes the names of the tensors of the decoder in the state of the run.

    Raises:
        ConfigError: If settings of adapters match no layer.
    """
    with _naming(settings):
        return _part_of(planned_layers(_root_of(settings), list(settings.lora)), prefix)


def _part_of(layers: Mapping[str, LoraLayer], prefix: str) -> dict[str, LoraLayer]:
    return {
        name.removeprefix(prefix): one for name, one in layers.items() if name.startswith(prefix)
    }


def _refuse_links(given: object) -> None:
    """Refuse a folder that a model is made from whose settings are links out of it."""
    if isinstance(given, str) and Path(given).expanduser().is_dir():
        require_files_inside(Path(given).expanduser(), SETTINGS_PATTERNS)


def _root_of(settings: RootSettings) -> Module:
    arguments = copy.deepcopy(dict(settings.arguments))
    if settings.policy is not None:
        arguments["dpo"] = {**(arguments.get("dpo") or {}), "reference_free": True}
    if settings.is_of_transformers:
        own = arguments if settings.policy is None else arguments[_POLICY]
        if own.get("trust_remote_code") and not settings.is_given:
            raise ConfigError(
                "trust_remote_code is true: Python code of the folder would run. If you trust it, "
                "pass the configuration of the run: --params FILE."
            )
        own["init_device"] = "meta"
        _refuse_links(own.get(FOLDER_KEY))
        if own.get(FOLDER_KEY) is not None:
            own["pretrained"] = False
        if isinstance(own.get("peft_config"), dict):
            for key in _WITHOUT_VALUES:
                own["peft_config"].pop(key, None)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said when the run began
        return model_class(settings.name)(**arguments)


def restore_settings(model: TheirModel, settings: RootSettings) -> None:
    """Give a model the settings that it has in the run: whether it has weights, and adapters."""
    given = settings.arguments if settings.policy is None else settings.policy
    assert model.wrapper is not None
    model.wrapper.settings = replace(
        model.wrapper.settings,
        pretrained=given.get("pretrained"),
        peft_config=given.get("peft_config"),
    )


@contextmanager
def _naming(settings: RootSettings) -> Iterator[None]:
    """Context manager: errors name the file of the settings."""
    try:
        yield
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{settings.where}: {error}") from error
