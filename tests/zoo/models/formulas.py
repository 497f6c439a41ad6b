"""The parts of a decoder written out, from the formulas and not from the code."""

from typing import Any

import torch
from torch import Tensor


def normed(states: Tensor, norm: Any, epsilon: float = 1e-5) -> Tensor:
    """Return layer normalization, or that by the root mean square if there is no bias."""
    bias = getattr(norm, "bias", None)
    if bias is not None:
        states = states - states.mean(-1, keepdim=True)
    scaled = states / (states.square().mean(-1, keepdim=True) + epsilon).sqrt()
    return scaled * norm.weight + (0 if bias is None else bias)


def projected(states: Tensor, linear: Any) -> Tensor:
    """Return the states times the matrix of a layer, and its bias."""
    product = torch.einsum("bti,oi->bto", states, linear.weight)
    return product if linear.bias is None else product + linear.bias


def turned(states: Tensor, dim: int) -> Tensor:
    """Rotate the first `dim` of a head: k and k + dim / 2 are the parts of a complex number."""
    rates = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(states.shape[1], dtype=torch.float64), rates)[:, None]
    first, second = states[..., : dim // 2], states[..., dim // 2 : dim]
    parts = (
        first * angles.cos() - second * angles.sin(),
        second * angles.cos() + first * angles.sin(),
    )
    return torch.cat((*parts, states[..., dim:]), dim=-1)


def attended(
    states: Tensor,
    attention: Any,
    *,
    groups: int,
    dim: int | None,
    head_dim: int = 8,
    factor: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Return causal attention of four heads, one by one; `factor`: of the scores."""
    heads = []
    queries, keys, values = (
        projected(states, getattr(attention, f"{part}_proj")).unflatten(-1, (-1, head_dim))
        for part in "qkv"
    )
    if dim is not None:
        queries, keys = turned(queries, dim), turned(keys, dim)
    for head in range(4):
        group = head * groups // 4
        scores = torch.einsum("bqd,bkd->bqk", queries[:, :, head], keys[:, :, group])
        scores = scores * (head_dim**-0.5 if factor is None else factor)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        for query in range(scores.shape[1]):
            scores[:, query, query + 1 :] = float("-inf")
            if window is not None and query >= window:
                scores[:, query, : query - window + 1] = float("-inf")
        heads.append(scores.softmax(-1) @ values[:, :, group])
    return projected(torch.cat(heads, dim=-1), attention.o_proj)
