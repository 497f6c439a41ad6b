"""Softmax attention by blocks of queries, in plain torch: exact, with memory linear in the length.

For each block, the scores over the keys that it may see are computed, used and dropped; the
backward pass computes them again from the saved sums. So windows also save time, and a soft cap, a
bias, packed documents or dropout need no more memory than causal attention.

Source of the backward pass: Dao et al. 2022, https://arxiv.org/abs/2205.14135, appendix B.

It is one operation for autograd, for `torch.compile` and for plans, which need only its shapes.

Dimension letters: B batch, T queries, S keys, N heads, G groups of keys and values, D head
dimension of queries and keys, E of values, R distances with a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from modelzoo_trainer.base.devices import define_operator, refuse_second_derivatives
from modelzoo_trainer.zoo.models.autocast import without_autocast
from modelzoo_trainer.zoo.models.visible import (
    Tile,
    Visible,
    bias_of,
    mask_of,
    of_keys,
    sums_of_diagonals,
    tiles,
)

_Found = TypeVar("_Found")

_SCORES: Final = 1 << 20  # of a block, in all its sequences and heads
_TALLEST: Final = 512  # queries of a block
_SHORTEST: Final = 64  # with fewer, products are slow
_FEWEST_GROUPS: Final = 2  # of keys in a block: they share a mask
_MIX: Final = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))
"""Shifts and factors of `lowbias32`: Wellons 2018, https://nullprogram.com/blog/2018/07/31/."""
_ODD: Final = (0x9E3779B1 - (1 << 32), 0x85EBCA77 - (1 << 32))


class Scoring(NamedTuple):
    """How scores become weights: constants of the operation."""

    scale: float
    softcap: float  # 0 = none
    dropout: float


def attend_by_blocks(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Visible,
    *,
    scale: float,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return the attention output of every head; see `attend`.

    Shapes:
        queries: (B, N, T, D). keys: (B, G, S, D). values: (B, G, S, E). Returns: (B, N, T, E).

    Cost:
        Between forward and backward pass: the inputs, the output and a float32 for each query and
        head; while it runs, a few tiles of `_SCORES` float32 numbers. No host read, no
        data-dependent shape. Gradients are sums in a fixed order.
    """
    seed = None
    if dropout > 0:  # only this number is drawn; the operation derives the others from it
        seed = torch.randint(-(1 << 31), 1 << 31, (1,), dtype=torch.int32, device=queries.device)
    output: Tensor = _ATTEND(
        queries,
        keys,
        values,
        visible.after,
        visible.before,
        visible.padding,
        visible.bias,
        seed,
        [visible.causal, visible.window or 0, visible.sinks, visible.offset],
        [scale, softcap or 0.0, dropout],
    )[0]
    return output


def _visible(
    after: Tensor | None,
    before: Tensor | None,
    padding: Tensor | None,
    bias: Tensor | None,
    rule: Sequence[int],
) -> Visible:
    causal, window, sinks, offset = rule
    return Visible(
        causal=bool(causal),
        window=window or None,
        sinks=sinks,
        after=after,
        before=before,
        padding=padding,
        bias=bias,
        offset=offset,
    )


def block_height(visible: Visible, num_heads: int, num_queries: int, num_keys: int) -> int:
    """Return the number of queries in a block; `num_heads`: of a group of keys."""
    if visible.window is not None and visible.hides_by_window(num_keys):
        # A block sees `window` keys more than it has queries: higher blocks share them, but most of
        # their queries do not see most of these keys.
        tallest = min(_TALLEST, max(_SHORTEST, visible.window // 4))
    else:
        tallest = _TALLEST
    num_pairs = num_heads * max(1, num_seen(visible, tallest, num_keys))
    fits = _SCORES // (_FEWEST_GROUPS * num_pairs)
    return max(1, min(num_queries, tallest, max(_SHORTEST, fits)))


def num_seen(visible: Visible, height: int, num_keys: int) -> int:
    """Return the largest number of keys that a block of this height sees."""
    if visible.window is None or not visible.hides_by_window(num_keys):
        return num_keys
    return min(num_keys, visible.window + height + visible.sinks)


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    after: Tensor | None,
    before: Tensor | None,
    padding: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    rule: Sequence[int],
    scoring: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Return the output (B, N, T, E) and the logarithms of the sums of weights (B, N, T)."""
    visible = _visible(after, before, padding, bias, rule)
    output, sums = _shapes(queries, keys, values)
    for blocks in _parts(queries, keys, seed, visible, Scoring(*scoring)):
        grouped = blocks.of_groups(values).flatten(0, 1)
        own, own_sums = (blocks.of_heads(one) for one in (output, sums))
        for tile in blocks.tiles():
            weights = blocks.scores(tile)[0]
            largest = weights.amax(dim=-1, keepdim=True)
            weights.sub_(largest).exp_()
            total = weights.sum(dim=-1, keepdim=True)
            own_sums[..., tile.first : tile.last] = (largest + total.log()).squeeze(-1)
            kept = blocks.kept(tile)
            if kept is not None:
                weights.mul_(kept)
            found = _times(blocks.flat(weights), of_keys(grouped, tile, 1))
            own[..., tile.first : tile.last, :] = found.view(*total.shape[:-1], -1) / total
    return output, sums


def _positions_first(queries: Tensor, width: int) -> Tensor:
    """Return an empty tensor (B, N, T, width) that lies in memory as (B, T, N, width).

    As linear layers make and take it, so that it is not copied.
    """
    size, heads, num_queries, _ = queries.shape
    return queries.new_empty((size, num_queries, heads, width)).transpose(1, 2)


def _shapes(queries: Tensor, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(queries.dtype, torch.float32)
    output = _positions_first(queries, values.shape[-1])
    return output, queries.new_empty(queries.shape[:3], dtype=wide)


def _attend_backward(
    gradient: Tensor,
    output: Tensor,
    sums: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    after: Tensor | None,
    before: Tensor | None,
    padding: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    rule: Sequence[int],
    scoring: Sequence[float],
    trains_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and bias (empty if it is not trained)."""
    visible = _visible(after, before, padding, bias, rule)
    of_queries = torch.empty_like(queries)
    of_sums = [torch.zeros_like(one, dtype=sums.dtype) for one in (keys, values)]
    of_bias = torch.zeros_like(bias if trains_bias and bias is not None else sums.new_empty(0))
    for blocks in _parts(queries, keys, seed, visible, Scoring(*scoring)):
        _add_gradients(
            blocks,
            [blocks.of_heads(one) for one in (gradient, output, sums, of_queries)],
            [blocks.of_groups(one) for one in (values, *of_sums)],
            of_bias[blocks.heads] if of_bias.numel() else None,
        )
    return of_queries, of_sums[0].to(keys.dtype), of_sums[1].to(values.dtype), of_bias


def _add_gradients(
    blocks: _Blocks,
    of_heads: Sequence[Tensor],
    of_groups: Sequence[Tensor],
    of_bias: Tensor | None,
) -> None:
    """Compute the gradients of some sequences and heads.

    Args:
        blocks: These sequences and heads.
        of_heads: The gradient of the output, the output, its sums; the gradient of the queries,
            which is written.
        of_groups: The values; the gradients of keys and values, which are added to.
        of_bias: The gradient of the bias, which is added to.
    """
    gradient, output, sums, of_queries = of_heads
    values, of_own_keys, of_values = of_groups
    grouped = values.flatten(0, 1)
    for tile in blocks.tiles():
        rows = slice(tile.first, tile.last)
        weights, slopes = blocks.scores(tile, with_slopes=True)
        weights.sub_(sums[..., rows, None]).exp_()
        own = gradient[..., rows, :]
        inner = (own.to(blocks.dtype) * output[..., rows, :]).sum(dim=-1, keepdim=True)
        flat = blocks.flat(own)
        of_weights = _times(flat, of_keys(grouped, tile, 1).transpose(1, 2)).view_as(weights)
        kept = blocks.kept(tile)
        used = weights if kept is None else weights * kept
        _add(of_values, tile, _times(blocks.flat(used).transpose(1, 2), flat))
        if kept is not None:
            of_weights.mul_(kept)
        of_scores = of_weights.sub_(inner).mul_(weights)
        if of_bias is not None:
            blocks.add_diagonals(of_bias, tile, of_scores)
        if slopes is not None:
            of_scores.mul_(slopes)
        flat = blocks.flat(of_scores.mul_(blocks.scoring.scale))
        found = _times(flat, of_keys(blocks.keys, tile, 1))
        of_queries[..., rows, :] = found.view(*inner.shape[:-1], -1)
        _add(of_own_keys, tile, _times(flat.transpose(1, 2), blocks.flat(blocks.rows(tile))))


def _shapes_backward(
    gradient: Tensor, output: Tensor, sums: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    queries, keys, values, _, _, _, bias, *_, trains_bias = given
    of_bias = bias if trains_bias and bias is not None else sums.new_empty(0)
    return (
        torch.empty_like(queries),
        torch.empty_like(keys),
        torch.empty_like(values),
        of_bias.new_empty(of_bias.shape),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, rule, scoring = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.constants = rule, scoring
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    rule, scoring = ctx.constants
    if gradient is None:
        return (None,) * 10
    refuse_second_derivatives("attention by blocks", "Set attention to dense.")
    trains_bias = ctx.needs_input_grad[6]
    found = _ATTEND_BACKWARD(gradient, *ctx.saved_tensors, rule, scoring, trains_bias)
    of_bias = found[3] if trains_bias else None
    return (*found[:3], None, None, None, of_bias, None, None, None)


def _exact(run: Callable[..., _Found]) -> Callable[..., _Found]:
    """Return the function without autocast, which would convert the scores to half precision."""

    @wraps(run)
    def exact(first: Tensor, *others: Any) -> _Found:
        with without_autocast(first.device.type):
            return run(first, *others)

    return exact


def _num_scores(queries: Any, keys: Any, rule: Sequence[int]) -> int:
    """Return how many scores are computed, from the shapes."""
    num_queries, num_keys = queries[2], keys[2]
    visible = _visible(None, None, None, None, rule)
    height = block_height(visible, queries[1] // keys[1], num_queries, num_keys)
    return int(
        queries[0]
        * queries[1]
        * sum(
            (tile.last - tile.first) * sum(stop - start for start, stop in tile.keys)
            for tile in tiles(visible, num_queries, num_keys, height)
        )
    )


def _flops(queries: Any, keys: Any, values: Any, *given: Any, **_: Any) -> int:
    return 2 * _num_scores(queries, keys, given[5]) * int(queries[-1] + values[-1])


def _flops_backward(_: Any, __: Any, ___: Any, *given: Any, **____: Any) -> int:
    queries, keys, values = given[:3]
    return 2 * _num_scores(queries, keys, given[8]) * int(3 * queries[-1] + 2 * values[-1])


_INPUTS: Final = (
    "Tensor queries, Tensor keys, Tensor values, Tensor? after, Tensor? before, Tensor? padding, "
    "Tensor? bias, Tensor? seed, int[] rule, float[] scoring"
)
_ATTEND: Final = define_operator(
    f"attend({_INPUTS}) -> (Tensor, Tensor)",
    _exact(_attend),
    _shapes,
    flops=_flops,
    keep=_keep,
    backward=_gradients,
)
_ATTEND_BACKWARD: Final = define_operator(
    f"attend_backward(Tensor gradient, Tensor output, Tensor sums, {_INPUTS}, bool trains_bias) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _exact(_attend_backward),
    _shapes_backward,
    flops=_flops_backward,
)


def _parts(
    queries: Tensor, keys: Tensor, seed: Tensor | None, visible: Visible, scoring: Scoring
) -> Iterator[_Blocks]:
    """Yield sequences and groups of heads that are computed at the same time."""
    (size, heads, num_queries, _), (_, groups, num_keys, _) = queries.shape, keys.shape
    height = block_height(visible, heads // groups, num_queries, num_keys)
    most = height * num_seen(visible, height, num_keys)
    num_groups = max(1, min(groups, _SCORES // (heads // groups * most)))
    num_rows = max(1, min(size, _SCORES // (heads * most))) if num_groups == groups else 1
    for row in range(0, size, num_rows):
        for group in range(0, groups, num_groups):
            places = (
                slice(row, min(row + num_rows, size)),
                slice(group, min(group + num_groups, groups)),
            )
            yield _Blocks(queries, keys, seed, visible, scoring, places, height)


class _Blocks:
    """Some sequences and groups of heads, and the scores of their blocks."""

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        seed: Tensor | None,
        visible: Visible,
        scoring: Scoring,
        places: tuple[slice, slice],
        height: int,
    ) -> None:
        num, self._num_heads = queries.shape[1] // keys.shape[1], queries.shape[1]
        self._rows, self._groups = places
        self.heads = slice(self._groups.start * num, self._groups.stop * num)
        self.num_queries, self.num_keys = queries.shape[2], keys.shape[2]
        self.shape = (
            self._rows.stop - self._rows.start,
            self._groups.stop - self._groups.start,
            num,
            self.num_queries,
        )
        self.queries = self.of_heads(queries)
        self.keys = self.of_groups(keys).flatten(0, 1)  # a view for one sequence
        after, before, padding = (
            None if one is None else one[self._rows]
            for one in (visible.after, visible.before, visible.padding)
        )
        bias = None if visible.bias is None else visible.bias[self.heads]
        self.visible = visible._replace(after=after, before=before, padding=padding, bias=bias)
        self.seed, self.scoring, self._height = seed, scoring, height
        self.dtype = torch.promote_types(queries.dtype, torch.float32)

    def of_heads(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor (B, N, T, ...), as (sequences, groups, heads, T, ...)."""
        return tensor[self._rows, self.heads].view(*self.shape, *tensor.shape[3:])

    def of_groups(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor (B, G, S, ...)."""
        return tensor[self._rows, self._groups]

    def tiles(self) -> list[Tile]:
        """Return all blocks."""
        return list(tiles(self.visible, self.num_queries, self.num_keys, self._height))

    def rows(self, tile: Tile) -> Tensor:
        """Return the queries of a block, (B, G, N / G, rows, D)."""
        return self.queries[..., tile.first : tile.last, :]

    @staticmethod
    def flat(rows: Tensor) -> Tensor:
        """Return rows of a block for a matrix product, (B * G, N / G * rows, ...)."""
        return rows.reshape(rows.shape[0] * rows.shape[1], -1, rows.shape[-1])

    def scores(self, tile: Tile, *, with_slopes: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the scores of a block, -inf where hidden; and the derivatives of the soft cap.

        Shapes:
            Returns: (B, G, N / G, rows, keys), at least float32.
        """
        queries, device = self.rows(tile), self.queries.device
        found = _times(self.flat(queries), of_keys(self.keys, tile, 1).transpose(1, 2))
        found = found.view(*queries.shape[:-1], -1).mul_(self.scoring.scale)
        slopes = None
        if self.scoring.softcap:
            found.div_(self.scoring.softcap).tanh_()
            if with_slopes:
                slopes = found.square().neg_().add_(1)
            found.mul_(self.scoring.softcap)
        bias = bias_of(self.visible, tile, self.num_keys)
        if bias is not None:
            found.add_(bias.view(*self.shape[1:3], *bias.shape[1:]))
        mask = mask_of(self.visible, tile, self.num_keys, device)
        if mask is not None:
            found.masked_fill_(~mask[:, None, None], float("-inf"))
        return found, slopes

    def kept(self, tile: Tile) -> Tensor | None:
        """Return 0 for weights that are dropped, 1 / (1 - rate) for others; None = no dropout.

        Which ones depends only on the seed, the head and the positions, not on the blocks.
        """
        if self.seed is None:
            return None
        rate, device = self.scoring.dropout, self.seed.device
        numbers = torch.arange(self._rows.start, self._rows.stop, dtype=torch.int32, device=device)
        heads = torch.arange(self.heads.start, self.heads.stop, dtype=torch.int32, device=device)
        of_heads = ((numbers * self._num_heads)[:, None] + heads).flatten()
        queries = torch.arange(tile.first, tile.last, dtype=torch.int32, device=device)
        rows = _mixed(
            _mixed(of_heads * _ODD[0] + self.seed)[:, None] + queries + self.visible.offset
        )
        numbers = torch.arange(self.num_keys, dtype=torch.int32, device=device)
        columns = of_keys(_mixed(numbers * _ODD[1] ^ self.seed), tile, 0)
        drawn = _mixed(rows.view(*self.shape[:3], -1, 1) ^ columns)
        limit = round(rate * (1 << 32)) - (1 << 31)
        return (drawn >= limit).to(self.dtype).mul_(1 / (1 - rate))

    def add_diagonals(self, of_bias: Tensor, tile: Tile, of_scores: Tensor) -> None:
        """Add the gradient of the scores of a block to the bias's, (N, R)."""
        smallest = 0 if self.visible.causal else 1 - self.num_keys
        pairs, begin = of_scores.sum(dim=0).flatten(0, 1).to(of_bias.dtype), 0
        for start, stop in tile.keys:
            width = stop - start
            sums = sums_of_diagonals(pairs[..., begin : begin + width])
            first = self.visible.offset + tile.first - stop + 1 - smallest  # place of the first sum
            skipped = max(0, -first)
            of_bias[:, first + skipped : first + sums.shape[1]] += sums[:, skipped:]
            begin += width


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix products, at least float32, also of half precision."""
    wide = torch.promote_types(torch.promote_types(left.dtype, right.dtype), torch.float32)
    return torch.bmm(left.to(wide), right.to(wide))


def _add(total: Tensor, tile: Tile, found: Tensor) -> None:
    """Add what a block found for its keys, (B * G, keys, width), to (B, G, S, width)."""
    found, begin = found.view(*total.shape[:2], -1, total.shape[3]), 0
    for start, stop in tile.keys:
        total[:, :, start:stop] += found[:, :, begin : begin + stop - start]
        begin += stop - start


def _mixed(numbers: Tensor) -> Tensor:
    """Return a hash of int32 numbers, whose products overflow; the highest bits are the best."""
    found = numbers
    for shift, factor in _MIX:
        # Shifts of negative numbers fill with ones, which the mask removes.
        high = (found >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        found = high.bitwise_xor_(found).mul_(factor)
    return found
