"""Which keys a query sees, as a rule: causal, window, documents, padding, bias by distance.

A rule needs memory that is linear in the number of positions. Implementations of attention ask it
for the tile of queries and keys that they are about to compute.

Dimension letters: B batch, T queries, S keys, N heads, R distances with a bias.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor


class Visible(NamedTuple):
    """Which keys each query sees, and the bias of the scores by distance.

    With distance = position of the query - position of the key, a query sees a key if all that is
    given holds:

        causal         0 <= distance
        window         distance < window, or the key is one of the first `sinks` keys
        after          distance <= after of the key
        before         -distance <= before of the key
        padding        the key is not padding

    With `padding` and `causal`, a query that would see nothing sees itself: attention over nothing
    would be NaN. Otherwise each query must see a key.

    Attributes:
        causal: Whether later keys are hidden.
        window: Number of keys that a query sees, including its own; None = no window.
        sinks: Number of keys at the beginning that all later queries see, despite the window.
        after: For each key, the largest distance of a query after it, >= 0. In a row of packed
            documents of n tokens each, that is n - 1, ..., 0.
        before: For each key, the largest distance of a query before it, >= 0.
        padding: True for keys that are padding.
        bias: Added to the scores, by distance: of 0, 1, ... if causal; else of -(S - 1), ..., S -
            1.
        offset: Position of the first query; the first key has position 0.
        position: The position of the only query, among S keys; None = see `offset`.

    Shapes:
        after, before: (B, S) integer. padding: (B, S) bool. bias: (N, R) floating, at least
        float32, R >= S (causal) or 2 S - 1. position: (1,) integer.
    """

    causal: bool = True
    window: int | None = None
    sinks: int = 0
    after: Tensor | None = None
    before: Tensor | None = None
    padding: Tensor | None = None
    bias: Tensor | None = None
    offset: int = 0
    position: Tensor | None = None

    def hides_by_window(self, num_keys: int) -> bool:
        """Return whether the window hides any of so many keys."""
        return self.window is not None and num_keys > self.window + self.sinks

    def is_plain(self, num_queries: int, num_keys: int) -> bool:
        """Return whether nothing but the causal rule applies, or nothing at all."""
        is_square = num_queries == num_keys and self.offset == 0
        return (
            (is_square or not self.causal)
            and not self.hides_by_window(num_keys)
            and self.position is None
            and all(one is None for one in (self.after, self.before, self.padding, self.bias))
        )


EVERYTHING: Final = Visible(causal=False)
"""Each query sees all keys."""


class Tile(NamedTuple):
    """Queries `first` to `last`, and the keys that one of them may see, as up to two ranges."""

    first: int
    last: int
    keys: tuple[tuple[int, int], ...]


def tiles(visible: Visible, num_queries: int, num_keys: int, height: int) -> Iterator[Tile]:
    """Yield the queries in blocks of at most `height`, each with the keys that it may see."""
    for first in range(0, num_queries, height):
        last = min(first + height, num_queries)
        stop = min(visible.offset + last, num_keys) if visible.causal else num_keys
        start = 0
        if visible.window is not None and visible.hides_by_window(num_keys):
            start = max(0, visible.offset + first - visible.window + 1)
        if visible.sinks < start and visible.sinks:
            yield Tile(first, last, ((0, visible.sinks), (start, stop)))
        else:
            yield Tile(first, last, ((0 if visible.sinks else start, stop),))


def of_keys(tensor: Tensor, tile: Tile, dim: int) -> Tensor:
    """Return the part of a tensor that belongs to the keys of a tile."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in tile.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def mask_of(visible: Visible, tile: Tile, num_keys: int, device: torch.device) -> Tensor | None:
    """Return which keys of a tile its queries see; None = all of them.

    Shapes:
        Returns: (1 or B, queries of the tile, keys of the tile), bool.
    """
    keys = of_keys(torch.arange(num_keys, device=device, dtype=torch.int32), tile, 0)
    if visible.position is None:
        queries = torch.arange(tile.first, tile.last, device=device, dtype=torch.int32)
        distances = (queries + visible.offset)[:, None] - keys
    else:
        distances = visible.position[:, None] - keys
    rules = list(_rules(visible, tile, distances, keys, num_keys))
    if not rules:
        return None
    found = rules[0]
    for rule in rules[1:]:
        found = found & rule
    if visible.padding is not None and visible.causal:
        found = found | (~found.any(dim=-1, keepdim=True) & (distances == 0))
    return found


def _rules(
    visible: Visible, tile: Tile, distances: Tensor, keys: Tensor, num_keys: int
) -> Iterator[Tensor]:
    """Yield which keys each rule shows, (1 or B, queries of the tile, keys of the tile)."""
    if visible.causal:
        yield (distances >= 0)[None]
    if visible.window is not None and visible.hides_by_window(num_keys):
        yield ((distances < visible.window) | (keys < visible.sinks))[None]
    if visible.after is not None:
        yield distances <= of_keys(visible.after, tile, 1)[:, None]
    if visible.before is not None:
        yield -distances <= of_keys(visible.before, tile, 1)[:, None]
    if visible.padding is not None:
        yield ~of_keys(visible.padding, tile, 1)[:, None]


def bias_of(visible: Visible, tile: Tile, num_keys: int) -> Tensor | None:
    """Return what is added to the scores of a tile; of keys that are hidden, any number.

    Shapes:
        Returns: (N, queries of the tile, keys of the tile).
    """
    if visible.bias is None:
        return None
    smallest = 0 if visible.causal else 1 - num_keys
    if visible.position is not None:
        keys = torch.arange(num_keys, device=visible.bias.device)
        places = (visible.position[:, None] - keys - smallest).clamp(min=0)
        return visible.bias[:, places]
    parts = [
        _diagonals(visible.bias, smallest, visible.offset + tile.first - start, tile, stop - start)
        for start, stop in tile.keys
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _diagonals(by_distance: Tensor, smallest: int, corner: int, tile: Tile, width: int) -> Tensor:
    """Return values of (query, key) from values by distance.

    Only views, copies and padding: gradients are sums in a fixed order, and no index is needed.

    `smallest`: distance of the first value; smaller ones get 0. `corner`: the distance of the first
    query and the first key. `width`: number of keys.

    Shapes:
        by_distance: (N, R). Returns: (N, queries of the tile, width).
    """
    num, height = by_distance.shape[0], tile.last - tile.first
    # In rows of length L that become rows of L - 1, each is the one above, moved right by one.
    earlier = _between(by_distance, smallest, corner - width + 1, corner + 1).flip(-1)
    later = _between(by_distance, smallest, corner + 1, corner + height).flip(-1)
    row = torch.cat((earlier, by_distance.new_zeros((num, 1)), later), dim=-1)
    length = width + height
    rows = row[:, None].expand(num, height, length).reshape(num, -1)
    pairs = rows[:, : height * (length - 1)].reshape(num, height, length - 1)
    return pairs[..., :width]


def _between(by_distance: Tensor, smallest: int, start: int, stop: int) -> Tensor:
    """Return the values of the distances `start` to `stop`, 0 before the smallest, (N, number)."""
    missing = min(max(0, smallest - start), stop - start)
    found = by_distance[:, start + missing - smallest : stop - smallest]
    if not missing:
        return found
    return torch.cat((by_distance.new_zeros((by_distance.shape[0], missing)), found), dim=-1)


def sums_of_diagonals(pairs: Tensor) -> Tensor:
    """Return the sums of values of (query, key) by distance, in a fixed order.

    Shapes:
        pairs: (N, T, S). Returns: (N, T + S - 1), of the distances -(S - 1), ..., T - 1 between
        places in `pairs`.
    """
    num, height, width = pairs.shape
    length = height + width
    # The reverse of `_diagonals`: rows of L that become rows of L - 1 have diagonals as columns.
    rows = torch.nn.functional.pad(pairs.flip(-1), (0, height)).reshape(num, -1)
    skewed = rows[:, : height * (length - 1)].reshape(num, height, length - 1)
    return skewed.sum(dim=1)


def whole(num_queries: int, num_keys: int) -> Tile:
    """Return the tile of all queries and all keys."""
    return Tile(0, num_queries, ((0, num_keys),))
