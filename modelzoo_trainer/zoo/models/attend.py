"""Softmax attention, by the implementation that fits what may be seen, and the device.

Which one is chosen depends on constants, shapes and the device, never on values:

    what may be seen                          on every device         on CUDA
    all keys, or causal                       torch's fused kernel    the same
    not causal, padding                       torch's fused kernel    the same
    anything else, or a soft cap              blocks of queries       flex attention
    with dropout, where no kernel has it      blocks of queries       blocks of queries
    one new token of a generation             dense                   dense

Dimension letters: B batch, T queries, S keys, N heads, G groups of keys and values (N a multiple of
G), D head dimension.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from modelzoo_trainer.base.devices import has_fused_dropout, has_trained_flex_attention
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.attend_blocks import attend_by_blocks
from modelzoo_trainer.zoo.models.attend_flex import attend_by_flex
from modelzoo_trainer.zoo.models.autocast import without_autocast
from modelzoo_trainer.zoo.models.visible import Visible, bias_of, mask_of, whole

Implementation = Literal["auto", "blocks", "flex", "dense"]

_EVERYTHING = Visible()
_LEAST_OF_FLEX = 16  # numbers of a head


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    visible: Visible = _EVERYTHING,
    softcap: float | None = None,
    dropout: float = 0.0,
    implementation: Implementation = "auto",
) -> Tensor:
    """Return the attention output of every head.

    Scores are `scale * queries @ keys`, then `softcap * tanh(scores / softcap)`, then the bias of
    `visible` is added. Head i of the queries uses group i * G // N of keys and values.

    Args:
        queries: Of all heads.
        keys: Of all groups.
        values: Of all groups.
        scale: Factor on the products of queries and keys.
        visible: Which keys each query sees, and the bias; the default is causal.
        softcap: Bound of the scores, > 0; None = no bound.
        dropout: Dropout rate of the attention weights.
        implementation: `auto`, or always the same one; with `dense`, memory grows with T x S.

    Shapes:
        queries: (B, N, T, D). keys, values: (B, G, S, D). Returns: as queries.

    Cost:
        Memory is linear in T and S, except with `dense`. No host read, no data-dependent shape.

    Raises:
        ConfigError: If the device lacks the implementation.
    """
    kind = implementation
    if visible.position is not None:
        kind = "dense"  # its mask has one row
    elif kind == "auto":
        if _has_kernel(queries, keys, visible, softcap, dropout):
            return _fused(queries, keys, values, visible, scale, dropout)
        kind = "flex" if _can_train_flex(queries, visible, dropout) else "blocks"
    if kind == "blocks":
        return attend_by_blocks(
            queries, keys, values, visible, scale=scale, softcap=softcap, dropout=dropout
        )
    if kind == "flex":
        _check_flex(queries, visible, dropout)
        return attend_by_flex(queries, keys, values, visible, scale=scale, softcap=softcap)
    return _dense(queries, keys, values, visible, scale, softcap, dropout)


def _has_kernel(
    queries: Tensor, keys: Tensor, visible: Visible, softcap: float | None, dropout: float
) -> bool:
    """Return whether torch's fused kernels compute this without a mask of T x S."""
    if softcap is not None or (dropout > 0 and not has_fused_dropout(queries.device)):
        return False
    rest = visible if visible.causal else visible._replace(padding=None)
    return rest.is_plain(queries.shape[2], keys.shape[2])


def _fused(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Visible,
    scale: float,
    dropout: float,
) -> Tensor:
    seen = None if visible.padding is None else ~visible.padding[:, None, None]
    if seen is not None:
        # No fused kernel takes both a mask and grouped heads: with groups left as they are, the
        # T x S scores of all heads would be materialized.
        keys, values = expand_groups(queries, keys), expand_groups(queries, values)
    return functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=seen,
        dropout_p=dropout,
        is_causal=visible.causal,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )


def _can_train_flex(queries: Tensor, visible: Visible, dropout: float) -> bool:
    is_expressible = dropout == 0 and not (visible.causal and visible.padding is not None)
    has_kernel = queries.shape[-1] >= _LEAST_OF_FLEX and queries.dtype != torch.float64
    return is_expressible and has_kernel and has_trained_flex_attention(queries.device)


def _check_flex(queries: Tensor, visible: Visible, dropout: float) -> None:
    if dropout > 0:
        raise ConfigError(
            f"attention: flex has no dropout of attention weights, but the rate is {dropout}. Set "
            f"attention_dropout_rate: 0.0, or attention: auto."
        )
    if visible.causal and visible.padding is not None:
        raise ConfigError(
            "attention: flex does not support padding in a causal model, which this batch has. Set "
            "attention: auto or blocks."
        )
    if not has_trained_flex_attention(queries.device):
        raise ConfigError(
            f"attention: flex is not supported on the device {queries.device.type}, where torch "
            f"has no backward pass for it. Set attention: auto or blocks."
        )
    if queries.shape[-1] < _LEAST_OF_FLEX or queries.dtype == torch.float64:
        raise ConfigError(
            f"attention: flex supports heads of at least {_LEAST_OF_FLEX} numbers that are not "
            f"float64, but a head has {queries.shape[-1]} of {queries.dtype}. Set attention: auto "
            f"or blocks."
        )


def _dense(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Visible,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    mask = _dense_mask(visible, queries.shape[2], keys.shape[2], queries.device)
    if softcap is not None:
        return _written_out(queries, keys, values, mask, scale, softcap, dropout)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(queries.dtype)
    keys, values = expand_groups(queries, keys), expand_groups(queries, values)
    return functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, dropout_p=dropout, scale=scale
    )


def _dense_mask(
    visible: Visible, num_queries: int, num_keys: int, device: torch.device
) -> Tensor | None:
    """Return what is seen, (1 or B, 1, T, S) bool, or with a bias what is added to the scores."""
    tile = whole(num_queries, num_keys)
    seen, bias = mask_of(visible, tile, num_keys, device), bias_of(visible, tile, num_keys)
    if seen is not None:
        seen = seen[:, None]
    if bias is None:
        return seen
    return bias[None] if seen is None else bias[None].masked_fill(~seen, float("-inf"))


def expand_groups(queries: Tensor, grouped: Tensor) -> Tensor:
    """Repeat keys or values so that every head of the queries has its own.

    Shapes:
        queries: (B, N, T, D). grouped: (B, G, S, D). Returns: (B, N, S, D).
    """
    num = queries.shape[1] // grouped.shape[1]
    return grouped if num == 1 else grouped.repeat_interleave(num, dim=1)


def _written_out(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
) -> Tensor:
    keys, values = expand_groups(queries, keys), expand_groups(queries, values)
    exact = torch.promote_types(queries.dtype, torch.float32)
    with without_autocast(queries.device.type):
        scores = (queries.to(exact) * scale) @ keys.to(exact).transpose(-1, -2)
        scores = torch.tanh(scores / softcap) * softcap
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            scores = scores + mask
        weights = scores.softmax(dim=-1)
        if dropout > 0:
            weights = functional.dropout(weights, dropout)
        return weights.to(values.dtype) @ values
