"""JAIS and BTLM, which transformers lacks: ALiBi, SwiGLU and muP in one model, written out."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from modelzoo_trainer.zoo.models.registry import model_class

HEADS, DIM, WIDTH, FILTER, LAYERS = 6, 4, 24, 40, 2
SETTINGS: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": WIDTH,
    "num_heads": HEADS,
    "filter_size": FILTER,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 9,
    "dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
    "position_embedding_type": "alibi",
    "nonlinearity": "swiglu",
    "mup_base_hidden_size": 8,
    "mup_base_filter_size": 13.5,
    "embeddings_scale": 14.6,
    "output_logits_alpha": 2.22,
    "scale_qk_dot_by_d": True,
}
SLOPES = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]  # of 4 heads, then of 8: 1st, 3rd


def linear(states: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return states @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def norm(states: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    centred = states - states.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def attention(states: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    queries, keys, values = (linear(states, weights, f"{name}.{part}_proj") for part in "qkv")
    length, heads = states.shape[0], []
    for head in range(HEADS):
        own = slice(head * DIM, (head + 1) * DIM)
        rows = []
        for query in range(length):
            scores = torch.stack(
                [
                    queries[query, own] @ keys[key, own] / DIM - SLOPES[head] * (query - key)
                    for key in range(query + 1)
                ]
            )
            rows.append(scores.softmax(0) @ values[: query + 1, own])
        heads.append(torch.stack(rows))
    return linear(torch.cat(heads, dim=-1), weights, f"{name}.o_proj")


def feed_forward(states: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    gate = linear(states, weights, f"{name}.gate_proj")
    wide = linear(states, weights, f"{name}.up_proj") * gate / (1 + torch.exp(-gate))
    return linear(wide, weights, f"{name}.down_proj")


def logits(ids: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Return the logits of one row of tokens."""
    table = weights["token_embeddings.weight"]
    hidden = table[ids] * 14.6
    for idx in range(LAYERS):
        layer = f"layers.{idx}"
        normed = norm(hidden, weights, f"{layer}.attention_norm")
        hidden = hidden + attention(normed, weights, f"{layer}.attention")
        normed = norm(hidden, weights, f"{layer}.ffn_norm")
        hidden = hidden + feed_forward(normed, weights, f"{layer}.ffn")
    return norm(hidden, weights, "final_norm") @ table.T * (2.22 / (WIDTH / 8))


@pytest.mark.parametrize("name", ["jais", "btlm"])
def test_logits_and_gradients_are_those_of_the_formula(name: str) -> None:
    model: Any = model_class(name)(**SETTINGS).double().eval()
    generator = torch.Generator().manual_seed(0)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    with torch.no_grad():
        for key, param in params.items():
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_(noise * 0.3 + float(key.endswith("norm.weight")))
    ids = torch.randint(19, (9,), generator=generator)
    cotangent = torch.randn(9, 19, generator=generator, dtype=torch.float64)

    found = model.logits(ids[None])[0]
    expected = logits(ids, params)

    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    ours = torch.autograd.grad(found, list(params.values()), cotangent)
    theirs = torch.autograd.grad(expected, list(params.values()), cotangent)
    for key, one, other in zip(params, ours, theirs, strict=True):
        bound = max(other.abs().max().item(), 1.0)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-8 * bound, msg=f"{key} differs")
    assert math.isclose(model.layers[0].attention.scale, 1 / DIM)
