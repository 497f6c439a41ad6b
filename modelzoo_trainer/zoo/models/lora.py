"""Which layers have LoRA adapters, and their settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch.nn import Embedding, Linear, Module

from modelzoo_trainer.base.constraints import (
    FinitePositiveFloat,
    Fraction,
    Names,
    PositiveInt,
    checked,
)
from modelzoo_trainer.errors import ConfigError, suggest


@checked("Lora.lora_params")
@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Settings of the adapters of some layers.

    Args:
        r: Rank, > 0.
        alpha: The adapter's output is multiplied by alpha / r; > 0.
        dropout: Dropout probability of the adapter's input, in [0, 1).
        fan_in_fan_out: Whether the layers store their weight transposed.
        merge_weights: Whether to merge the adapters into the weights during validations; weights
            that several layers share are not merged, as each layer adds a different adapter.
        target_modules: Names of classes or modules, all of which must occur in the path to a layer,
            including the layer; None = every `Linear` and `Embedding`.

    Raises:
        ConfigError: If a value is out of range.
    """

    r: PositiveInt
    alpha: FinitePositiveFloat = 1.0
    dropout: Fraction = 0.0
    fan_in_fan_out: bool = False
    merge_weights: bool = False
    target_modules: Names | None = None


def configs_of(given: Any) -> list[LoraConfig]:
    """Return the settings of the argument `lora_params`: one, or a list.

    Raises:
        ConfigError: If one is invalid, or there is none.
    """
    found = given if isinstance(given, list) else [given]
    if not found:
        raise ConfigError("Lora.lora_params is empty; give settings such as {r: 8}.")
    return [_config_of(one) for one in found]


def _config_of(given: Any) -> LoraConfig:
    if isinstance(given, LoraConfig):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"Lora.lora_params must be a dict such as {{r: 8, alpha: 16}}, or a list of such "
            f"dicts; got {given!r}."
        )
    known = [field.name for field in fields(LoraConfig)]
    for name in given:
        if name not in known:
            raise ConfigError(f"Lora.lora_params has no setting {name!r}. {suggest(name, known)}")
    if "r" not in given:
        raise ConfigError("Lora.lora_params.r is missing; give the rank, an integer > 0.")
    return LoraConfig(**given)


def choose_layers(model: Module, configs: Sequence[LoraConfig]) -> list[list[str]]:
    """Return the names of the layers that match each of the settings; a layer has the first.

    Raises:
        ConfigError: If one of them matches no layer.
    """
    ways = dict(_ways(model))
    chosen: list[list[str]] = []
    taken: set[str] = set()
    for config in configs:
        wanted = set(config.target_modules or ())
        names = [name for name, way in ways.items() if wanted <= way and name not in taken]
        if not names:
            words = sorted(set().union(*ways.values()))
            missing = next((word for word in sorted(wanted) if word not in words), "")
            raise ConfigError(
                f"Lora.lora_params.target_modules is {config.target_modules}, but "
                f"{type(model).__name__} has no {'other ' if taken else ''}Linear or Embedding"
                f"{' with all of these in its path' if wanted else ''}. "
                f"{suggest(missing, words) if missing else ''}".rstrip()
            )
        taken.update(names)
        chosen.append(names)
    return chosen


def peft_settings(config: LoraConfig, names: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `peft.LoraConfig` for some layers."""
    return {
        "r": config.r,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "fan_in_fan_out": config.fan_in_fan_out,
        "target_modules": "|".join(map(re.escape, names)),  # a string must match the whole name
    }


def _ways(model: Module) -> Iterator[tuple[str, set[str]]]:
    """Yield the layers that can have adapters, with the names on the path to each."""
    words: dict[str, set[str]] = {"": {type(model).__name__}}
    frozen = set(getattr(model, "frozen_parts", ()))
    for name, module in model.named_modules():
        if name.partition(".")[0] in frozen:
            continue
        if name:
            parent, _, last = name.rpartition(".")
            words[name] = words[parent] | {last, type(module).__name__}
        if isinstance(module, (Linear, Embedding)):
            yield name, words[name]
