"""Adapters of the library `peft` in a model of `transformers`, and names without them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any, Final

from torch.nn import Module

from modelzoo_trainer.errors import ConfigError, suggest

_ADAPTER: Final = "default"
_BASE: Final = ".base_layer."
ORIGINAL: Final = ".original_module."
"""Part of the name of a layer that has a trained copy (`modules_to_save`)."""
_COPY: Final = re.compile(r"\.modules_to_save\.[^.]+\.")
_DEFAULT_TYPE: Final = "LORA"
_KEEP_THE_WEIGHTS: Final = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that do not change the weights of the layer."""
_HEADS: Final = {
    "QUESTION_ANS": ("qa_outputs",),
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
}
"""Layers that are trained beside the adapters by `task_type`, as in `get_peft_model` of `peft`."""
_UNSUPPORTED: Final = {
    "trainable_token_indices": "has rows of an embedding as adapters, which cannot be merged",
    "layer_replication": "uses layers twice, which transformers cannot save",
}


def check_peft(given: Mapping[str, Any]) -> Any:
    """Return the settings of adapters as an object of `peft`.

    Raises:
        ConfigError: If `peft` is not installed, a key is unknown, or a value is invalid.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError(
            "peft_config requires the peft library, which is not installed: "
            'pip install "modelzoo-trainer[huggingface]"'
        ) from None
    kinds = {one.value: cls for one, cls in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = given.get("peft_type", _DEFAULT_TYPE)
    if not isinstance(kind, str) or kind.upper() not in kinds:
        raise ConfigError(
            f"peft_config.peft_type: {kind!r} is not a kind of adapters of peft. "
            f"{suggest(str(kind), kinds)}"
        )
    if kind.upper() == "ADALORA":
        raise ConfigError(
            "peft_config.peft_type: ADALORA changes ranks during training, which is not supported. "
            "Use LORA."
        )
    cls = kinds[kind.upper()]
    known = {one.name for one in fields(cls)}
    for key in given:
        if key not in known:
            raise ConfigError(
                f"peft_config.{key}: no such setting of {kind}. {suggest(str(key), known)}"
            )
        if given[key] is not None and key in _UNSUPPORTED:
            raise ConfigError(f"peft_config.{key} {_UNSUPPORTED[key]}. Remove it.")
    try:
        made = cls(**{key: one for key, one in given.items() if key != "peft_type"})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"peft_config: peft rejects it: {error}.") from error
    _add_heads(made)
    return made


def _add_heads(settings: Any) -> None:
    """Add the heads that a task trains beside the adapters to the layers to train."""
    heads = _HEADS.get(str(getattr(settings.task_type, "value", settings.task_type)), ())
    if heads and hasattr(settings, "modules_to_save"):
        given = settings.modules_to_save or ()
        settings.modules_to_save = list(dict.fromkeys((*given, *heads)))


def keeps_weights(start: Any) -> bool:
    """Return whether `init_lora_weights` of this value leaves the weights of a layer unchanged."""
    return (start.lower() if isinstance(start, str) else start) in _KEEP_THE_WEIGHTS


def add_adapters(model: Module, given: Mapping[str, Any]) -> None:
    """Put adapters into a model, which keeps its class; only they are trained.

    They are float32 with any type of the weights, as from `get_peft_model` of `peft`.

    Raises:
        ConfigError: As `check_peft`, or if no layer matches.
    """
    settings = check_peft(given)
    import peft

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # it corrects this itself
            # Shared weights are written twice where their adapters differ.
            warnings.filterwarnings("ignore", ".*a tied layer is part of the adapter")
            peft.inject_adapter_in_model(settings, model, _ADAPTER)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"peft_config: peft rejects it: {error}") from error
    del model.peft_config  # of peft, which nothing reads here
    import_module("peft.tuners.tuners_utils").cast_adapter_dtype(model, _ADAPTER)


class PlainNames:
    """The names that the tensors of a model with adapters have without them.

    Args:
        names: The names in its state dict.
    """

    def __init__(self, names: Iterable[str]) -> None:
        found = list(names)
        wrapped = {name.partition(_BASE)[0] + "." for name in found if _BASE in name}
        copied = {name.partition(ORIGINAL)[0] + "." for name in found if ORIGINAL in name}
        self.plain: dict[str, str] = {}
        """Plain name by name, without names of adapters."""
        self.added: set[str] = set()
        """Names of adapters, and of trained copies of a layer."""
        for name in found:
            if _COPY.search(name):
                self.added.add(name)
                self.plain[name] = _COPY.sub(".", name)
            elif _BASE in name:
                self.plain[name] = name.replace(_BASE, ".")
            elif ORIGINAL in name:
                self.added.add(name)  # the copy has its plain name
                self.plain[name] = name.replace(ORIGINAL, ".")
            elif name.startswith(tuple(wrapped | copied)):
                self.added.add(name)
            else:
                self.plain[name] = name
