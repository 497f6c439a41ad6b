"""Softmax attention by torch's `flex_attention`, compiled to one kernel that skips hidden blocks.

Packed documents need no other kernel: blocks of other documents are skipped. torch's attention over
documents of several lengths (`varlen_attn`) needs their number on the host.

Dimension letters: B batch, T queries, S keys, N heads, G groups of keys and values, D head
dimension, Q and K numbers of blocks of queries and keys.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from modelzoo_trainer.zoo.models.visible import Visible

_SIDE: Final = 128  # queries and keys of a block: what torch's kernels prefer


def attend_by_flex(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Visible,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Return the attention output of every head; see `attend`.

    `visible`: without padding, if it is causal.

    Shapes:
        queries: (B, N, T, D). keys, values: (B, G, S, D). Returns: as queries.

    Cost:
        Memory is linear in T and S, but for a few bytes per block. No host read. Gradients of a
        bias are sums without a fixed order.
    """
    num_queries, num_keys, bias = queries.shape[2], keys.shape[2], visible.bias
    smallest = 0 if visible.causal else 1 - num_keys

    def score(scores: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if bias is not None:
            place = query + visible.offset - key - smallest
            scores = scores + bias[head, place.clamp(min=0)]
        return scores

    found: Tensor = _flex_attention()(
        queries,
        keys,
        values,
        score_mod=None if softcap is None and bias is None else score,
        block_mask=block_mask(visible, num_queries, num_keys, queries.device),
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return found


def _flex_attention() -> Callable[..., Any]:
    from torch.nn.attention import flex_attention as module  # slow to import

    plain: Callable[..., Any] = module.flex_attention
    return plain if torch.compiler.is_compiling() else _compiled()


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled


def block_mask(visible: Visible, num_queries: int, num_keys: int, device: torch.device) -> Any:
    """Return a `BlockMask`, computed from bounds of each block, not from single positions.

    Cost:
        A few bytes for each of Q x K blocks.
    """
    from torch.nn.attention.flex_attention import BlockMask

    seen, is_full = blocks_seen(visible, num_queries, num_keys, device)
    partial, full = _listed(seen & ~is_full), _listed(is_full)
    return BlockMask.from_kv_blocks(
        *partial,
        *full,
        BLOCK_SIZE=_SIDE,
        mask_mod=_mask_mod(visible),
        seq_lengths=(num_queries, num_keys),
    )


def _mask_mod(visible: Visible) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the rule for single positions."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + visible.offset - key
        found = distance >= 0 if visible.causal else distance == distance
        if visible.window is not None:
            found = found & ((distance < visible.window) | (key < visible.sinks))
        if visible.after is not None:
            found = found & (distance <= visible.after[batch, key])
        if visible.before is not None:
            found = found & (-distance <= visible.before[batch, key])
        if visible.padding is not None:
            found = found & ~visible.padding[batch, key]
        return found

    return sees


def blocks_seen(
    visible: Visible, num_queries: int, num_keys: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return which blocks have a visible pair of query and key, perhaps; and which only such.

    Shapes:
        Returns: twice (1 or B, 1, Q, K), bool.
    """
    first_key, last_key = _bounds(num_keys, device)
    first, last = ((bound + visible.offset)[:, None] for bound in _bounds(num_queries, device))
    ends_inside = (first_key + _SIDE <= num_keys)[None]  # shorter blocks are checked one by one
    seen, is_full = [torch.ones_like(first < first_key)], [ends_inside]  # (Q, K) with any rules
    if visible.causal:
        seen.append(last >= first_key)
        is_full.append(first >= last_key)
    if visible.window is not None:
        seen.append((first - last_key < visible.window) | (first_key < visible.sinks))
        is_full.append((last - first_key < visible.window) | (last_key < visible.sinks))
    numbers = torch.arange(num_keys, device=device)
    if visible.after is not None:
        least, most = _by_block(numbers + visible.after)
        seen.append(most[:, None] >= first)
        is_full.append(least[:, None] >= last)
    if visible.before is not None:
        least, most = _by_block(numbers - visible.before)
        seen.append(least[:, None] <= last)
        is_full.append(most[:, None] <= first)
    if visible.padding is not None:
        least, most = _by_block(visible.padding.int())
        seen.append(least[:, None] == 0)
        is_full.append(most[:, None] == 0)
    return _all(seen)[:, None], _all([*seen, *is_full])[:, None]


def _bounds(num: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first and the last position of each block."""
    first = torch.arange(0, num, _SIDE, device=device)
    return first, (first + _SIDE - 1).clamp(max=num - 1)


def _by_block(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the largest value of each block of keys, (B, S) to twice (B, K)."""
    missing = -values.shape[1] % _SIDE
    padded = functional.pad(values[:, None].float(), (0, missing), mode="replicate")[:, 0]
    blocks = padded.to(values.dtype).view(len(values), -1, _SIDE)
    return blocks.amin(dim=2), blocks.amax(dim=2)


def _all(rules: list[Tensor]) -> Tensor:
    """Return where all rules hold, as (1 or B, Q, K)."""
    found = rules[0]
    for rule in rules[1:]:
        found = found & rule
    return found if found.dim() == 3 else found[None]


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen blocks of each row, and all blocks, the chosen ones first."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1, dtype=torch.int32), order.int()
