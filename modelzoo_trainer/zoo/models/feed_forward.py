"""Feed-forward part of a layer, plain or gated, and normalization layers."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

NormType = Literal["layernorm", "rmsnorm", "biasless-layernorm", "nonparametric-layernorm"]

_NORMS: Final[Mapping[str, Callable[..., nn.Module]]] = MappingProxyType(
    {
        "layernorm": nn.LayerNorm,
        "rmsnorm": nn.RMSNorm,
        "biasless-layernorm": partial(nn.LayerNorm, bias=False),
        "nonparametric-layernorm": partial(nn.LayerNorm, elementwise_affine=False),
    }
)


def make_norm(norm_type: NormType, size: int, epsilon: float) -> nn.Module:
    """Return a normalization layer over the last dimension.

    `epsilon`: added to the variance, > 0.
    """
    return _NORMS[norm_type](size, eps=epsilon)


Nonlinearity = Literal[
    "gelu",
    "gelu_new",
    "gelu_fast",
    "quick_gelu",
    "squared_gelu",
    "relu",
    "relu6",
    "leaky_relu",
    "squared_relu",
    "silu",
    "swish",
    "mish",
    "sigmoid",
    "tanh",
    "linear",
    "swiglu",
    "geglu",
    "geglu_new",
    "reglu",
    "liglu",
]


def _quick_gelu(values: Tensor) -> Tensor:
    return values * torch.sigmoid(1.702 * values)


def _squared_gelu(values: Tensor) -> Tensor:
    return functional.gelu(values).square()


def _squared_relu(values: Tensor) -> Tensor:
    return functional.relu(values).square()


def _unchanged(values: Tensor) -> Tensor:
    return values


_PLAIN: Final[Mapping[str, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {
        "gelu": functional.gelu,
        "gelu_new": partial(functional.gelu, approximate="tanh"),
        # The same but for the digits of a constant that the Model Zoo writes.
        "gelu_fast": partial(functional.gelu, approximate="tanh"),
        "quick_gelu": _quick_gelu,
        "squared_gelu": _squared_gelu,
        "relu": functional.relu,
        "relu6": functional.relu6,
        "leaky_relu": functional.leaky_relu,
        "squared_relu": _squared_relu,
        "silu": functional.silu,
        "swish": functional.silu,
        "mish": functional.mish,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "linear": _unchanged,
    }
)
GATED: Final[Mapping[str, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {
        "swiglu": functional.silu,
        "geglu": functional.gelu,
        "geglu_new": partial(functional.gelu, approximate="tanh"),
        "reglu": functional.relu,
        "liglu": _unchanged,
    }
)


def activation_of(nonlinearity: Nonlinearity) -> Callable[[Tensor], Tensor]:
    """Return the function; a gated one applies it to the second projection only."""
    return GATED.get(nonlinearity) or _PLAIN[nonlinearity]


class FeedForward(nn.Module):
    """Plain or gated feed-forward network; a gated one multiplies by a second projection.

    `nonlinearity`: its name; `swiglu`, `geglu`, `geglu_new`, `reglu` and `liglu` are gated.
    `inner_dropout_rate`: dropout of the wide states.
    """

    def __init__(
        self,
        hidden_size: int,
        filter_size: int,
        nonlinearity: Nonlinearity,
        use_bias: bool,
        inner_dropout_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, filter_size, bias=use_bias)
        self.gate_proj: nn.Linear | None = None
        if nonlinearity in GATED:
            self.gate_proj = nn.Linear(hidden_size, filter_size, bias=use_bias)
        self.down_proj = nn.Linear(filter_size, hidden_size, bias=use_bias)
        self.activation = activation_of(nonlinearity)
        self.inner_dropout_rate = inner_dropout_rate

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the transformed states, of the same shape."""
        wide: Tensor = self.up_proj(hidden)
        if self.gate_proj is None:
            wide = self.activation(wide)
        else:
            wide = wide * self.activation(self.gate_proj(hidden))
        if self.inner_dropout_rate and self.training:
            wide = functional.dropout(wide, self.inner_dropout_rate)
        narrow: Tensor = self.down_proj(wide)
        return narrow
