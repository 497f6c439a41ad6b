"""Low-rank adapters (LoRA)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Callback, Loader, StateDict
from modelzoo_trainer.checkpointing.state_json import bare_names
from modelzoo_trainer.core.model import ModelCallback
from modelzoo_trainer.core.optimizer import OptimizerCallback
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.hugging_face.initializing import adapter_steps
from modelzoo_trainer.zoo.models.lora import LoraConfig, choose_layers, configs_of, peft_settings

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.lora")

_ADAPTER: Final = "default"
_OWN: Final = re.compile(r"(?:^|\.)lora_(?:A|B|embedding_A|embedding_B)(?:\.|$)")
_BASE: Final = ".base_layer."


class Lora(Callback):
    """Train LoRA adapters (Hu et al. 2021, arXiv:2106.09685) instead of the full weights.

    Adapters come from the `peft` library, in float32; the rest of the model is frozen. The model
    keeps its class and methods. Checkpoints contain the adapters and the frozen weights. A run may
    start from a checkpoint or a weights file without adapters: these keep their initial values
    then, which add nothing. With several settings, a layer gets the first one that matches it. A
    model may name children that get none in its attribute `frozen_parts`, such as the reference of
    `dpo`.

    Args:
        lora_params: Settings `r`, `alpha`, `dropout`, `fan_in_fan_out`, `merge_weights` and
            `target_modules` (see `LoraConfig`), or a list of such settings.

    Cost: With `merge_weights`, a copy of the merged weights during a validation.

    Raises:
        ConfigError: If a setting is invalid; at setup, if `peft` is not installed, no layer
            matches, or the optimizer was created before the adapters.
    """

    reads_weights_early = True

    def __init__(
        self, lora_params: LoraConfig | dict[str, Any] | list[LoraConfig | dict[str, Any]]
    ) -> None:
        self.lora_params = configs_of(lora_params)
        self._mergeable: list[Any] = []
        self._weights: list[Tensor] = []
        """Weights of these layers before adapters were merged into them; empty = not merged."""
        self._merges = False

    # ---- the model

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        own: ModelCallback = trainer.callbacks["model"]
        optimizer: OptimizerCallback = trainer.callbacks["optimizer"]
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
        inject, peft_config, cast = _library()
        chosen = choose_layers(model, self.lora_params)
        for config, names in zip(self.lora_params, chosen, strict=True):
            if names:
                inject(peft_config(**peft_settings(config, names)), model, _ADAPTER)
                del model.peft_config  # peft refuses a second one; nothing here reads it
        cast(model, _ADAPTER)
        for name, param in model.named_parameters():
            param.requires_grad_(_OWN.search(name) is not None)
        layers = dict(model.named_modules())
        _draw_adapters_last(model)
        self._mergeable = [
            layers[name]
            for config, names in zip(self.lora_params, chosen, strict=True)
            for name in names
            if config.merge_weights and _is_alone(layers[name], layers.values())
        ]
        _log_size(model, sum(map(len, chosen)))
        warn_of_frozen = getattr(model, "warn_of_frozen", None)
        if warn_of_frozen is not None:  # a model of transformers with a new head
            warn_of_frozen()
        return model

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
        if trainer.backend.caps.sharded_state or not self._mergeable or self._merges:
            return  # the output of sharded weights is the same unmerged
        own: ModelCallback = trainer.callbacks["model"]
        stack.callback(self._unmerge)
        stack.enter_context(own.replaced(self._unmerged))
        stack.callback(setattr, self, "_merges", False)
        self._merges = True
        self._merge()

    @contextmanager
    def _unmerged(self) -> Iterator[None]:
        """Within a validation: context manager in which the layers have their own weights."""
        self._unmerge()
        try:
            yield
        finally:
            self._merge()

    def _merge(self) -> None:
        """Merge the adapters into the weights of their layers."""
        self._weights = [layer.get_base_layer().weight.data.clone() for layer in self._mergeable]
        for layer in self._mergeable:
            layer.merge()

    @torch.no_grad()
    def _unmerge(self) -> None:
        for layer, before in zip(self._mergeable, self._weights, strict=False):
            layer.unmerge()
            layer.get_base_layer().weight.copy_(before)  # subtracting is not exact
        self._weights = []

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        if ckpt_path is not None:
            self._unmerge()

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if self._merges:  # a validation that has loaded a checkpoint
            self._merge()

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


def _library() -> tuple[Any, Any, Any]:
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
        from peft.tuners.tuners_utils import cast_adapter_dtype
    except ImportError:
        raise ConfigError(
            "Lora requires the peft library, which is not installed: "
            "pip install 'modelzoo-trainer[lora]'"
        ) from None
    return inject_adapter_in_model, PeftConfig, cast_adapter_dtype


def _is_alone(layer: Any, layers: Iterable[Module]) -> bool:
    """Return whether no other layer shares the weight."""
    weight = layer.get_base_layer().weight
    owners = [one for one in layers if any(own is weight for own in one._parameters.values())]
    return len(owners) == 1


def _draw_adapters_last(model: Module) -> None:
    """Let peft initialize the adapters of a model without values, so that they add nothing."""
    if not any(param.is_meta for param in model.parameters()):
        return
    for layer in model.modules():
        if hasattr(layer, "reset_lora_parameters"):
            layer.reset_steps = partial(adapter_steps, layer)  # type: ignore[assignment]


def _log_size(model: Module, num_layers: int) -> None:
    params = list(model.parameters())
    num = sum(param.numel() for param in params if param.requires_grad)
    total = sum(param.numel() for param in params)
    log.info(
        "LoRA: adapters in %d layers; %d of %d parameters are trainable.", num_layers, num, total
    )
