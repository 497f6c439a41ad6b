"""Feed-forward networks, plain and gated."""

import typing

import pytest
import torch
from torch.nn import functional

from modelzoo_trainer.models.feed_forward import FeedForward, Nonlinearity


@pytest.mark.parametrize("name", typing.get_args(Nonlinearity))
def test_no_nonlinearity_is_linear(name: Nonlinearity) -> None:
    torch.manual_seed(0)
    network = FeedForward(4, 16, name, use_bias=False)
    one, other = torch.randn(3, 4), torch.randn(3, 4)

    assert network(one).shape == (3, 4)
    assert not torch.allclose(network(one + other), network(one) + network(other), atol=1e-4)


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
