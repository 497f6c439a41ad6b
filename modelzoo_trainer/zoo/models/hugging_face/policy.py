"""A model of `transformers` as the policy of `dpo`: without dropout, and without its adapters."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from torch.nn import Module
from torch.nn.modules.dropout import _DropoutNd

from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.models.hugging_face.adapters import PlainNames, keeps_weights
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm

_SECTION: Final = "model.policy_model"
_FLAG: Final = "_disable_adapters"
_RATE: Final = "drop"  # part of the names of all rates of dropout in transformers and peft


def check_policy(given: Mapping[str, Any]) -> None:
    """Check the settings of a policy that is a model of `transformers`.

    Raises:
        ConfigError: If a key is unknown, or one does not work with `dpo`.
    """
    known = list(inspect.signature(HfCausalLm).parameters)
    for key in given:
        if key not in known:
            raise ConfigError(f"{_SECTION}.{key}: no such setting. {suggest(str(key), known)}")
    if given.get("shift_labels"):
        raise ConfigError(
            f"{_SECTION}.shift_labels: the batches of dpo have the next tokens as labels, and dpo "
            f"has a loss of its own. Remove it."
        )
    adapters = given.get("peft_config")
    if not isinstance(adapters, Mapping):
        return
    start, bias = adapters.get("init_lora_weights", True), adapters.get("bias", "none")
    if not keeps_weights(start):
        raise ConfigError(
            f"{_SECTION}.peft_config.init_lora_weights: {start!r} changes the weights of the "
            f"model, which without its adapters is the reference. Use true, or gaussian."
        )
    if bias != "none":
        raise ConfigError(
            f"{_SECTION}.peft_config.bias: {bias!r} trains biases of the model, which without its "
            f"adapters is the reference. Use none."
        )


def warn_of_dropout(given: Mapping[str, Any]) -> None:
    """Warn of rates of dropout in the settings of a policy that is trained without it."""
    for section in ("config", "config_overrides", "peft_config"):
        for key, rate in (given.get(section) or {}).items():
            if _RATE in key and isinstance(rate, (int, float)) and rate:
                warnings.warn(
                    f"{_SECTION}.{section}.{key} ({rate}) has no effect: dpo trains without "
                    f"dropout. Remove it, or set model.dpo.disable_dropout: false.",
                    stacklevel=3,
                )


def remove_dropout(model: Any) -> None:
    """Set all rates of dropout of a model of `transformers` to 0, also in adapters.

    They are in modules of dropout, in attributes of other modules, and in the settings.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        _set_to_zero(module)
    for config in {id(one): one for one in (model.config, model.config.get_text_config())}.values():
        _set_to_zero(config)


def _set_to_zero(owner: Any) -> None:
    for name, value in list(vars(owner).items()):
        if _RATE in name and isinstance(value, float):
            setattr(owner, name, 0.0)


class Adapters:
    """The adapters of a model, which can be switched off.

    Args:
        model: A model with adapters of `peft`.

    Raises:
        ConfigError: If adapters of this kind cannot be switched off, or others of its weights are
            trained.
    """

    def __init__(self, model: Module) -> None:
        self._modules = list(model.modules())
        self._layers = [one for one in self._modules if hasattr(one, _FLAG)]
        if not self._layers:
            raise ConfigError(
                f"{_SECTION}.peft_config: it makes no adapters that can be switched off for the "
                f"reference. Use peft_type: LORA."
            )
        added = PlainNames(name for name, _ in model.named_parameters()).added
        for name, param in model.named_parameters():
            if param.requires_grad and name not in added:
                raise ConfigError(
                    f"{_SECTION}.peft_config: it trains {name!r}, outside of the adapters that are "
                    f"switched off for the reference. Use peft_type: LORA with bias: none."
                )

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context manager: the model computes without adapters and in eval mode.

        Only flags of the modules change, none of its tensors, nor which are trained.
        """
        training = [one for one in self._modules if one.training]
        for module in training:
            module.training = False
        for layer in self._layers:
            setattr(layer, _FLAG, True)
        try:
            yield
        finally:
            for layer in self._layers:
                setattr(layer, _FLAG, False)
            for module in training:
                module.training = True
