"""Initial values of a model of `transformers` that was built on `meta`, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import Module

from modelzoo_trainer.errors import ConfigError

Step = tuple[Module, Callable[[], object]]

_OF_ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


def reset_steps(model: Any) -> Iterator[Step]:
    """Yield the parts of a model of `transformers`, each with the function that initializes it.

    The functions belong to the library, `_init_weights`, which also fill the buffers that are
    not saved, such as frequencies of rotary positions. Children come before their parents, whose
    functions may draw weights of theirs again. Adapters of `peft` come last: they add nothing at
    first.

    Args:
        model: The model, with parameters on the host or on `meta`.

    Raises:
        ConfigError: If adapters start from the weights of the layers that they are added to.
    """
    initialize = torch.no_grad()(model._init_weights)
    adapted = [one for one in model.modules() if hasattr(one, "reset_lora_parameters")]
    of_adapters = {
        part
        for layer in adapted
        for name in _OF_ADAPTERS
        if isinstance(getattr(layer, name, None), Module)
        for part in getattr(layer, name).modules()
    }
    for module in _children_first(model, set()):
        if module not in of_adapters:
            yield module, partial(initialize, module)
    for layer in adapted:
        yield from adapter_steps(layer)


def _children_first(module: Module, seen: set[Module]) -> Iterator[Module]:
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def adapter_steps(layer: Any) -> Iterator[Step]:
    """Yield the adapters of a layer of `peft`, with the function that initializes them."""
    parts = nn.ModuleList(
        [getattr(layer, name) for name in _OF_ADAPTERS if _has_values(getattr(layer, name, None))]
    )
    for adapter in layer.r:
        yield parts, partial(layer.reset_lora_parameters, adapter, True)


def _has_values(module: object) -> bool:
    return isinstance(module, Module) and any(True for _ in module.parameters())


def check_adapters_on_meta(settings: Any) -> None:
    """Refuse adapters that cannot be initialized by themselves.

    Args:
        settings: Of `peft`.

    Raises:
        ConfigError: If their initial values are computed from the weights of their layers.
    """
    kind = getattr(settings, "init_lora_weights", True)
    if kind is not True or getattr(settings, "use_dora", False):
        raise ConfigError(
            f"init_device: meta builds the model without weights, from which peft_config "
            f"(init_lora_weights: {kind!r}, use_dora: {getattr(settings, 'use_dora', False)}) "
            f"cannot compute the adapters. Use init_lora_weights: true and use_dora: false, or "
            f"init_device: cpu."
        )
