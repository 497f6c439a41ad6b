"""Low-rank adapters (LoRA)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module
from typing_extensions import override

from modelzoo_trainer.callback import Callback, Loader, StateDict
from modelzoo_trainer.checkpointing.state_json import bare_names
from modelzoo_trainer.constraints import FinitePositiveFloat, Fraction, Names, PositiveInt, checked
from modelzoo_trainer.core.model import ModelCallback
from modelzoo_trainer.core.optimizer import OptimizerCallback
from modelzoo_trainer.errors import ConfigError, suggest

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.lora")

_ADAPTER: Final = "default"
_OWN: Final = re.compile(r"(?:^|\.)lora_(?:A|B|embedding_A|embedding_B)(?:\.|$)")
_BASE: Final = ".base_layer."


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


class Lora(Callback):
    """Train LoRA adapters (Hu et al. 2021, arXiv:2106.09685) instead of the full weights.

    Adapters come from the `peft` library; the rest of the model is frozen. The model keeps its
    class and methods. Checkpoints contain the adapters and the frozen weights. A run may start from
    a checkpoint or a weights file without adapters: these keep their initial values then, which add
    nothing. With several settings, a layer gets the first one that matches it. A model may name
    children that get none in its attribute `frozen_parts`, such as the reference of `dpo`.

    Args:
        lora_params: Settings `r`, `alpha`, `dropout`, `fan_in_fan_out`, `merge_weights` and
            `target_modules` (see `LoraConfig`), or a list of such settings.

    Cost: With `merge_weights`, a copy of the merged weights during a validation.

    Raises:
        ConfigError: If a setting is invalid; at setup, if `peft` is not installed, no layer
            matches, or the optimizer was created before the adapters.
    """

    def __init__(
        self, lora_params: LoraConfig | dict[str, Any] | list[LoraConfig | dict[str, Any]]
    ) -> None:
        given = lora_params if isinstance(lora_params, list) else [lora_params]
        if not given:
            raise ConfigError("Lora.lora_params is empty; give settings such as {r: 8}.")
        self.lora_params = [_config_of(one) for one in given]
        self._merged: list[Module] = []

    # ---- the model

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        own, optimizer = trainer.callbacks["model"], trainer.callbacks["optimizer"]
        assert isinstance(own, ModelCallback)
        assert isinstance(optimizer, OptimizerCallback)
        if optimizer.is_instance:
            raise ConfigError(
                "Lora: the optimizer was created before the adapters, so it cannot train them. "
                "Pass optimizer=lambda model: ... instead of an instance."
            )
        own.change(self._adapted)

    def _adapted(self, model: Module) -> Module:
        """Return the model with adapters; the optimizer is created after this."""
        if any(_OWN.search(name) for name, _ in model.named_parameters()):
            raise ConfigError(
                f"Lora: {type(model).__name__} already has LoRA adapters. Pass a model without "
                f"adapters; for different settings per layer, pass a list of lora_params to one "
                f"Lora."
            )
        inject, peft_config = _library()
        chosen = self._choose(model)
        for config, names in zip(self.lora_params, chosen, strict=True):
            if names:
                inject(peft_config(**_peft_settings(config, names)), model, _ADAPTER)
                del model.peft_config  # peft refuses a second one; nothing here reads it
        for name, param in model.named_parameters():
            param.requires_grad_(_OWN.search(name) is not None)
        layers = dict(model.named_modules())
        self._merged = [
            layers[name]
            for config, names in zip(self.lora_params, chosen, strict=True)
            for name in names
            if config.merge_weights and _is_alone(layers[name], layers.values())
        ]
        _log_size(model, sum(map(len, chosen)))
        return model

    def _choose(self, model: Module) -> list[list[str]]:
        """Return the names of the matching layers for each of the settings."""
        ways = dict(_ways(model))
        chosen: list[list[str]] = []
        taken: set[str] = set()
        for config in self.lora_params:
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

    @override
    def setup(self, trainer: Trainer) -> None:
        if not trainer.has_optimizer:
            return
        groups = [group for one in trainer.optimizers.values() for group in one.param_groups]
        for group in groups:  # of an optimizer over all parameters
            group["params"] = [param for param in group["params"] if param.requires_grad]
        if not any(group["params"] for group in groups):
            raise ConfigError(
                "Lora: the optimizer has no adapter parameters, so it trains nothing. Pass "
                "model.parameters() to it."
            )

    # ---- validation

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        if trainer.backend.caps.sharded_state:
            return  # weights are sharded; the output is the same unmerged
        for layer in self._merged:
            _merge(layer, stack)

    # ---- checkpoints without adapters

    @override
    def preprocess_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        found = state_dict.get("model")
        if not isinstance(found, Mapping) or any(_OWN.search(name) for name in found):
            return
        own = trainer.model.state_dict()
        plain = {bare.replace(_BASE, "."): bare for bare in bare_names(own)}
        renamed = {plain.get(name, name): found[name] for name in found}
        adapters = {name: own[name] for name in own if _OWN.search(name)}
        log.info(
            "The checkpoint has no LoRA adapters, so they start from their initial values. This "
            "is normal when starting from a base model."
        )
        state_dict["model"] = renamed | trainer.backend.host_state(adapters)


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


def _library() -> tuple[Any, Any]:
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError:
        raise ConfigError(
            "Lora requires the peft library, which is not installed: "
            "pip install 'modelzoo-trainer[lora]'"
        ) from None
    return inject_adapter_in_model, PeftConfig


def _peft_settings(config: LoraConfig, names: list[str]) -> dict[str, Any]:
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


def _is_alone(layer: Any, layers: Iterable[Module]) -> bool:
    """Return whether no other layer shares the weight."""
    weight = layer.get_base_layer().weight
    owners = [one for one in layers if any(own is weight for own in one._parameters.values())]
    return len(owners) == 1


def _merge(layer: Any, stack: ExitStack) -> None:
    """Merge an adapter into the weight of its layer until the stack is closed."""
    weight: Tensor = layer.get_base_layer().weight.data
    before = weight.clone()
    layer.merge()
    stack.callback(_unmerge, layer, before)


def _unmerge(layer: Any, before: Tensor) -> None:
    layer.unmerge()
    with torch.no_grad():
        layer.get_base_layer().weight.copy_(before)  # subtracting is not exact


def _log_size(model: Module, num_layers: int) -> None:
    params = list(model.parameters())
    num = sum(param.numel() for param in params if param.requires_grad)
    total = sum(param.numel() for param in params)
    log.info(
        "LoRA: adapters in %d layers; %d of %d parameters are trainable.", num_layers, num, total
    )
