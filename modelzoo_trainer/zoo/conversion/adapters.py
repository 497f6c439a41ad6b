"""Weights of a model with LoRA adapters, merged while they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module

from modelzoo_trainer.errors import CheckpointError, ConfigError
from modelzoo_trainer.zoo.conversion.engine import TensorSource
from modelzoo_trainer.zoo.conversion.weights_folder import Shape
from modelzoo_trainer.zoo.models.hugging_face.adapters import PlainNames
from modelzoo_trainer.zoo.models.lora import LoraConfig, choose_layers

_BASE: Final = ".base_layer."
_ORIGINAL: Final = ".original_module."
_FACTORS: Final = (("lora_A", "lora_B", ".weight"), ("lora_embedding_A", "lora_embedding_B", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLayer:
    """The adapter of a layer.

    Attributes:
        r: Its rank.
        scaling: What its product is multiplied by: alpha / r, or another function of both.
        is_transposed: Whether the layer stores its weight as (inputs, outputs).
        adapter: Its name.
    """

    r: int
    scaling: float
    is_transposed: bool = False
    adapter: str = "default"


def lora_layers(model: Module) -> dict[str, LoraLayer]:
    """Return the adapters of `peft` in a model, by the name of the layer.

    Raises:
        ConfigError: If they are not plain LoRA, whose product is added to a matrix.
    """
    found: dict[str, LoraLayer] = {}
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            found[name] = _lora_layer(name, module)
    return found


def _lora_layer(name: str, layer: Any) -> LoraLayer:
    kind = f"{type(layer).__module__}.{type(layer).__name__}"
    adapters = list(getattr(layer, "scaling", ()))
    why = ""
    if not hasattr(layer, "lora_A"):
        why = f"{kind} is no LoRA"
    elif len(adapters) != 1:
        why = f"the layer has the adapters {adapters}"
    elif getattr(layer, "lora_variant", None) or any(layer.use_dora.values()):
        why = "a variant of LoRA, such as DoRA"
    elif any(layer.lora_bias.values()):
        why = "lora_bias is true"
    elif not _is_matrix(layer.get_base_layer()):
        why = f"the layer is a {type(layer.get_base_layer()).__name__}"
    if why:
        raise ConfigError(
            f"The adapters of {name!r} cannot be exported: {why}. Plain LoRA in linear layers and "
            f"embeddings can be; use it, or save checkpoints of the trainer only."
        )
    (adapter,) = adapters
    return LoraLayer(
        r=layer.r[adapter],
        scaling=float(layer.scaling[adapter]),
        is_transposed=bool(getattr(layer, "fan_in_fan_out", False)),
        adapter=adapter,
    )


def _is_matrix(layer: Module) -> bool:
    return isinstance(layer, (Linear, Embedding)) or type(layer).__name__ == "Conv1D"


def planned_layers(model: Module, configs: list[LoraConfig]) -> dict[str, LoraLayer]:
    """Return the adapters that the callback `Lora` puts into a model, by the name of the layer.

    Args:
        model: Without adapters, possibly on `meta`.
        configs: The settings.

    Raises:
        ConfigError: If one of them matches no layer.
    """
    return {
        name: LoraLayer(r=config.r, scaling=config.alpha / config.r)
        for config, names in zip(configs, choose_layers(model, configs), strict=True)
        for name in names
    }


def has_adapters(source: TensorSource) -> bool:
    """Return whether tensors belong to a model with adapters."""
    return bool(PlainNames(source.names()).added)


class MergedAdapters:
    """A source of the weights of a model by their names without adapters, which are merged.

    Weights with adapters are computed in float32 and have their own dtype. Trained copies of layers
    (`modules_to_save`) replace the layers.

    Args:
        source: The tensors of the model with adapters, or without.
        layers: The adapters, by the name of the layer.
        where: Where the tensors are, for messages.

    Raises:
        CheckpointError: If the adapters in the source are not these.
    """

    def __init__(
        self, source: TensorSource, layers: Mapping[str, LoraLayer], *, where: str
    ) -> None:
        self._source = source
        self._stored: dict[str, str] = {}
        self._layers: dict[str, tuple[LoraLayer, str, str]] = {}  # by plain name: A and B
        self._copies: set[str] = set()
        names = PlainNames(source.names())
        for stored, plain in names.plain.items():
            if _ORIGINAL in f".{stored}":
                continue
            self._stored[plain] = stored
            if stored in names.added:
                self._copies.add(plain)
            elif _BASE in stored and stored.endswith(f"{_BASE}weight"):
                self._layers[plain] = self._adapter_of(stored, layers, names.added, where)
        used = {one for _, *factors in self._layers.values() for one in factors}
        copied = {stored for stored in names.added if ".modules_to_save." in stored}
        originals = {stored for stored in names.added if _ORIGINAL in f".{stored}"}
        odd = sorted(names.added - used - copied - originals)
        if odd:
            raise CheckpointError(
                f"{where} has the tensor {odd[0]!r} of adapters that are not plain LoRA, whose "
                f"product is added to a matrix. Only such adapters can be merged."
            )

    def _adapter_of(
        self, stored: str, layers: Mapping[str, LoraLayer], added: set[str], where: str
    ) -> tuple[LoraLayer, str, str]:
        name = stored.removesuffix(f"{_BASE}weight")
        layer = layers.get(name)
        if layer is None:
            raise CheckpointError(
                f"{where} has adapters in the layer {name!r}, but the settings of the run have "
                f"none there. Pass the configuration of the run: --params FILE."
            )
        for first, second, end in _FACTORS:
            left = f"{name}.{first}.{layer.adapter}{end}"
            right = f"{name}.{second}.{layer.adapter}{end}"
            if left not in added or right not in added:
                continue
            rank = self._source.shape(left)[0]
            if rank != layer.r:
                raise CheckpointError(
                    f"{where} has adapters of rank {rank} in the layer {name!r}, but the settings "
                    f"of the run have r: {layer.r}. Pass the configuration of the run: --params "
                    f"FILE."
                )
            return layer, left, right
        raise CheckpointError(
            f"{where} has adapters in the layer {name!r} that are not plain LoRA. Only plain LoRA "
            f"in linear layers and embeddings can be merged."
        )

    def names(self) -> list[str]:
        """Return the names of all tensors, without adapters."""
        return list(self._stored)

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor."""
        return self._source.shape(self._stored[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._source.dtype(self._stored[name])

    def is_changed(self, name: str) -> bool:
        """Return whether a tensor has an adapter, or is a trained copy."""
        return name in self._layers or name in self._copies

    def read(self, name: str) -> Tensor:
        """Return a tensor on the host, with its adapter.

        W + scaling * B A, Hu et al. 2021 (arXiv:2106.09685), section 4.1.
        """
        value = self._source.read(self._stored[name])
        if name not in self._layers:
            return value
        layer, first, second = self._layers[name]
        wide = torch.promote_types(value.dtype, torch.float32)
        left, right = self._source.read(first).to(wide), self._source.read(second).to(wide)
        added = (right @ left) * layer.scaling
        is_transposed = layer.is_transposed or "lora_embedding" in first
        return (value.to(wide) + (added.T if is_transposed else added)).to(value.dtype)
