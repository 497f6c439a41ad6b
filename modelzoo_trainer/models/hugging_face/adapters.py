"""Adapters of the library `peft` in a model of `transformers`, and names without them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

from modelzoo_trainer.errors import ConfigError, suggest

_ADAPTER: Final = "default"
_BASE: Final = ".base_layer."
_ORIGINAL: Final = ".original_module."
_COPY: Final = re.compile(r"\.modules_to_save\.[^.]+\.")
_DEFAULT_TYPE: Final = "LORA"
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
        return cls(**{key: one for key, one in given.items() if key != "peft_type"})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"peft_config: peft rejects it: {error}.") from error


def add_adapters(model: Module, given: Mapping[str, Any]) -> None:
    """Put adapters into a model, which keeps its class; only they are trained.

    They are float32 with any type of the weights, as those of `get_peft_model` of `peft` are.

    Raises:
        ConfigError: As `check_peft`, or if no layer matches.
    """
    settings = check_peft(given)
    import peft

    try:
        with warnings.catch_warnings():  # it corrects this setting itself
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
            peft.inject_adapter_in_model(settings, model, _ADAPTER)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"peft_config: peft rejects it: {error}") from error
    del model.peft_config  # of peft, which nothing reads here
    import_module("peft.tuners.tuners_utils").cast_adapter_dtype(model, _ADAPTER)


class PlainNames:
    """The names that the tensors of a model with adapters have without them.

    Args:
        names: Those of its state dict.
    """

    def __init__(self, names: Iterable[str]) -> None:
        found = list(names)
        wrapped = {name.partition(_BASE)[0] + "." for name in found if _BASE in name}
        copied = {name.partition(_ORIGINAL)[0] + "." for name in found if _ORIGINAL in name}
        self.plain: dict[str, str] = {}
        """Plain name by name, without those of adapters."""
        self.added: set[str] = set()
        """Names of adapters, and of trained copies of a layer."""
        for name in found:
            if _COPY.search(name):
                self.added.add(name)
                self.plain[name] = _COPY.sub(".", name)
            elif _BASE in name:
                self.plain[name] = name.replace(_BASE, ".")
            elif _ORIGINAL in name:
                self.added.add(name)  # the copy has its plain name
                self.plain[name] = name.replace(_ORIGINAL, ".")
            elif name.startswith(tuple(wrapped | copied)):
                self.added.add(name)
            else:
                self.plain[name] = name


@contextmanager
def merged_state(model: Module) -> Iterator[dict[str, Tensor]]:
    """Context manager: the weights of a model, with adapters merged into them, by plain names.

    The model's own weights are bitwise the same after it.

    Raises:
        ConfigError: If adapters of this kind cannot be merged.
    """
    layers: list[Any] = [one for one in model.modules() if _is_adapted(one)]
    kept = [(layer, _base_tensors(layer)) for layer in layers]
    try:
        for layer in layers:
            _merge(layer)
        state = model.state_dict()
        names = PlainNames(state)
        yield {
            names.plain[name]: value
            for name, value in state.items()
            if name in names.plain and _ORIGINAL not in name
        }
    finally:
        with torch.no_grad():
            for layer, tensors in kept:
                if layer.merged:
                    layer.unmerge()
                for own, value in tensors:
                    own.copy_(value)  # subtracting is not exact


def _is_adapted(module: Any) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "merge")


def _base_tensors(layer: Any) -> Any:
    return [(one, one.detach().clone()) for one in layer.get_base_layer().parameters()]


def _merge(layer: Any) -> None:
    try:
        layer.merge()
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"The adapters in {type(layer).__name__} cannot be merged into the weights ({error}). "
            f"Save a checkpoint of the trainer instead."
        ) from error
