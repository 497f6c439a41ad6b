"""Feed-forward networks, plain and gated."""

import typing

import pytest
import torch
from torch.nn import functional

from modelzoo_trainer.zoo.models.feed_forward import FeedForward, Nonlinearity, make_norm


@pytest.mark.parametrize("name", sorted({*typing.get_args(Nonlinearity)} - {"linear"}))
def test_no_nonlinearity_is_linear(name: Nonlinearity) -> None:
    torch.manual_seed(0)
    network = FeedForward(4, 16, name, use_bias=False)
    one, other = torch.randn(3, 4), torch.randn(3, 4)

    assert network(one).shape == (3, 4)
    assert not torch.allclose(network(one + other), network(one) + network(other), atol=1e-4)


# Values at -1 and 2, from the formulas.
VALUES = {
    "gelu": (-0.158655, 1.954500),
    "gelu_new": (-0.158808, 1.954598),
    "gelu_fast": (-0.158808, 1.954598),
    "quick_gelu": (-0.154204, 1.935659),
    "squared_gelu": (0.025171, 3.820069),
    "relu": (0.0, 2.0),
    "leaky_relu": (-0.01, 2.0),
    "squared_relu": (0.0, 4.0),
    "silu": (-0.268941, 1.761594),
    "swish": (-0.268941, 1.761594),
    "mish": (-0.303401, 1.943959),
    "sigmoid": (0.268941, 0.880797),
    "tanh": (-0.761594, 0.964028),
    "linear": (-1.0, 2.0),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_nonlinearity_has_its_values(name: Nonlinearity) -> None:
    activation = FeedForward(1, 1, name, use_bias=False).activation

    found = activation(torch.tensor([-1.0, 2.0])).tolist()

    assert found == pytest.approx(VALUES[name], abs=2e-6)


def test_relu6_ends_at_six_and_a_linear_gate_multiplies() -> None:
    assert FeedForward(1, 1, "relu6", use_bias=False).activation(torch.tensor(7.0)) == 6
    network = FeedForward(4, 16, "liglu", use_bias=False)
    states = torch.randn(3, 4)
    assert network.gate_proj is not None
    wide = network.up_proj(states) * network.gate_proj(states)
    torch.testing.assert_close(network(states), network.down_proj(wide))


@pytest.mark.parametrize(("name", "approximate"), [("geglu", "none"), ("geglu_new", "tanh")])
def test_a_gate_has_the_exact_gelu_or_its_tanh_form(name: Nonlinearity, approximate: str) -> None:
    network = FeedForward(4, 16, name, use_bias=False)
    states = torch.randn(3, 4)
    assert network.gate_proj is not None
    gates = functional.gelu(network.gate_proj(states), approximate=approximate)
    wide = network.up_proj(states) * gates
    torch.testing.assert_close(network(states), network.down_proj(wide), rtol=0, atol=1e-7)


def test_a_norm_without_parameters_only_scales() -> None:
    norm, plain = make_norm("nonparametric-layernorm", 8, 1e-5), torch.nn.LayerNorm(8, eps=1e-5)
    states = torch.randn(3, 8)

    assert [*norm.parameters()] == []
    assert torch.equal(norm(states), plain(states))


def test_a_gated_network_multiplies_by_the_activated_gate() -> None:
    torch.manual_seed(0)
    network = FeedForward(4, 16, "swiglu", use_bias=False)
    states = torch.randn(3, 4)
    assert network.gate_proj is not None

    up, gate = states @ network.up_proj.weight.T, states @ network.gate_proj.weight.T

    expected = (up * functional.silu(gate)) @ network.down_proj.weight.T
    torch.testing.assert_close(network(states), expected)


def test_a_plain_network_has_no_gate() -> None:
    assert FeedForward(4, 16, "gelu", use_bias=True).gate_proj is None
