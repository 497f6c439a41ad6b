"""The tensors of experts in the Cerebras Model Zoo, which depend on their implementation there.

Names after `transformer_decoder.layers.N.ffn.experts.`, for the expert E and the layers L (0, 1):

    experimental  experts.E.L.linear_layer.weight, and of shared experts, which count from 0 again,
                  shared_experts.E.ffn.L.linear_layer.weight
    functional    experts.E.ffn.L.linear_layer.weight; shared experts are the last ones
    optimized     fused_ffns.L.linear_layer.expert_weights, (out, E, in), and `expert_biases`,
                  (out, E, 1); shared experts are the last ones

The gate of a gated nonlinearity is `linear_layer_for_glu`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.zoo.conversion.rules import Copy, Read, Rule, Stacked
from modelzoo_trainer.zoo.conversion.weights_folder import Shape
from modelzoo_trainer.zoo.models.moe_settings import Implementation, MoeSettings

_OURS: Final = re.compile(r"layers\.(\d+)\.ffn\.experts\.(up|gate|down)(_bias)?")
_LAYERS: Final = {
    "up": "0.linear_layer",
    "gate": "0.linear_layer_for_glu",
    "down": "1.linear_layer",
}
_IMPLEMENTATIONS: Final[dict[Implementation, str]] = {
    "optimized": r"\.ffn\.experts\.fused_ffns\.",
    "functional": r"\.ffn\.experts\.experts\.\d+\.ffn\.",
    "experimental": r"\.ffn\.experts\.experts\.\d+\.\d+\.",
}


def implementation_of(names: Collection[str]) -> Implementation | None:
    """Return the implementation whose tensors have these names, None without experts."""
    for implementation, pattern in _IMPLEMENTATIONS.items():
        if any(re.search(pattern, name) for name in names):
            return implementation
    return None


def rule_of_experts(
    name: str, prefix: str, experts: MoeSettings, implementation: Implementation
) -> Rule | None:
    """Return the rule of one of our tensors of experts, None for another tensor.

    Args:
        name: Of our tensor.
        prefix: What precedes the names there.
        experts: The settings of the experts.
        implementation: Theirs.
    """
    found = _OURS.fullmatch(name)
    if found is None:
        return None
    there = f"{prefix}transformer_decoder.layers.{found[1]}.ffn.experts."
    layer = _LAYERS[found[2]]
    if implementation == "optimized":
        kind = "expert_biases" if found[3] else "expert_weights"
        return SecondDim(name, f"{there}fused_ffns.{layer}.{kind}")
    kind = "bias" if found[3] else "weight"
    places = _places(experts, implementation)
    return Stacked(name, tuple(f"{there}{place}.{layer}.{kind}" for place in places))


def _places(experts: MoeSettings, implementation: Implementation) -> Iterator[str]:
    """Yield what the names of each expert's tensors begin with, in our order: shared ones last."""
    if implementation == "functional":
        yield from (f"experts.{number}.ffn" for number in range(experts.num_in_all))
        return
    yield from (f"experts.{number}" for number in range(experts.num_experts))
    yield from (f"shared_experts.{number}.ffn" for number in range(experts.num_shared))


@dataclass(frozen=True, slots=True)
class SecondDim(Copy):
    """Tensors of experts, stacked along the first dimension here and along the second there.

    A bias has a third dimension there, of size 1.
    """

    @override
    def their_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        first, second, *rest = shapes[0]
        return [(second, first, *(rest or (1,)))]

    @override
    def to_theirs(self, read: Read) -> Iterator[Tensor]:
        tensor = read(0).transpose(0, 1).contiguous()
        yield tensor if tensor.dim() > 2 else tensor.unsqueeze(-1)

    @override
    def to_ours(self, read: Read, shapes: Sequence[Shape]) -> Iterator[Tensor]:
        yield read(0).transpose(0, 1).contiguous().view(shapes[0])
