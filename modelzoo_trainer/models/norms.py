"""Normalisation layers by their configuration names."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final, Literal

from torch import nn

NormType = Literal["layernorm", "rmsnorm", "biasless-layernorm"]

_NORMS: Final[Mapping[str, Callable[..., nn.Module]]] = MappingProxyType(
    {
        "layernorm": nn.LayerNorm,
        "rmsnorm": nn.RMSNorm,
        "biasless-layernorm": partial(nn.LayerNorm, bias=False),
    }
)


def make_norm(norm_type: NormType, size: int, epsilon: float) -> nn.Module:
    """Return a layer that normalises the last dimension.

    Args:
        norm_type: Which one.
        size: Of the last dimension.
        epsilon: Added to the variance, > 0.
    """
    return _NORMS[norm_type](size, eps=epsilon)
