"""Softmax attention, by the implementation that fits the mask and the softcap.

Which one is chosen depends on constants and shapes only, never on values:

    softcap   mask               implementation
    no        none (causal)      scaled_dot_product_attention, is_causal
    no        bool or floating   scaled_dot_product_attention, attn_mask
    yes       any                scores in float32, written out

Dimension letters: B batch, T queries, S keys, N heads, G groups of keys and values (N a multiple of
G), D head dimension.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return the attention output of every head.

    Scores are `scale * queries @ keys`, then `softcap * tanh(scores / softcap)`, then the mask.
    Head i of the queries uses group i * G // N of keys and values.

    Args:
        queries: Of all heads.
        keys: Of all groups.
        values: Of all groups.
        scale: Factor on the products of queries and keys.
        mask: None = causal, which requires S = T. Boolean: True = visible. Floating: added to the
            scores, -inf = hidden. Each query must see a key.
        softcap: Bound of the scores before the mask, > 0; None = no bound.
        dropout: Dropout rate of the attention weights.

    Shapes:
        queries: (B, N, T, D). keys, values: (B, G, S, D). mask: broadcasts to (B, N, T, S).
        Returns: as queries.

    Cost:
        With a softcap, several float32 tensors of (B, N, T, S) are kept for the backward pass. No
        host read, no data-dependent shape.
    """
    if softcap is not None:
        return _written_out(queries, keys, values, scale, mask, softcap, dropout)
    if mask is None:
        return functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            dropout_p=dropout,
            is_causal=True,
            scale=scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
    # No fused kernel takes both a mask and grouped heads: with groups left as they are, the
    # T x S scores of all heads would be materialized.
    keys, values = expand_groups(queries, keys), expand_groups(queries, values)
    if mask.dtype != torch.bool:
        mask = mask.to(queries.dtype)
    return functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, dropout_p=dropout, scale=scale
    )


def expand_groups(queries: Tensor, grouped: Tensor) -> Tensor:
    """Repeat keys or values so that every head of the queries has its own.

    Shapes:
        queries: (B, N, T, D). grouped: (B, G, S, D). Returns: (B, N, S, D).
    """
    num = queries.shape[1] // grouped.shape[1]
    return grouped if num == 1 else grouped.repeat_interleave(num, dim=1)


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context in which operations keep the dtype of their inputs."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _written_out(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    mask: Tensor | None,
    softcap: float,
    dropout: float,
) -> Tensor:
    keys, values = expand_groups(queries, keys), expand_groups(queries, values)
    exact = torch.promote_types(queries.dtype, torch.float32)
    with without_autocast(queries.device.type):
        scores = (queries.to(exact) * scale) @ keys.to(exact).transpose(-1, -2)
        scores = torch.tanh(scores / softcap) * softcap
        if mask is None:
            size = (queries.shape[-2], keys.shape[-2])
            mask = torch.ones(size, dtype=torch.bool, device=queries.device).tril()
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        else:
            scores = scores + mask
        weights = scores.softmax(dim=-1)
        if dropout > 0:
            weights = functional.dropout(weights, dropout)
        return weights.to(values.dtype) @ values
