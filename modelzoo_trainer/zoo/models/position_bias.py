"""Positions as a bias of the attention scores: ALiBi and relative buckets; fixed positions.

Dimension letters: B batch, T positions, N heads, H hidden size.
"""

import math
from collections.abc import Iterator
from itertools import chain
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelzoo_trainer.zoo.models.attend import without_autocast

_MAX_DISTANCE: Final = 128  # from which on all keys share the last bucket, as in T5
MAX_BUCKETS: Final = 2 * _MAX_DISTANCE - 1


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slopes of ALiBi, one per head.

    For N a power of two they are 2 ** (-8 h / N), h = 1 ... N. Otherwise the slopes of the next
    smaller power of two n, then every second one of 2n, beginning with the first.

    Source: Press et al. 2022, https://arxiv.org/abs/2108.12409, and its code.
    """
    whole = 1 << (num_heads.bit_length() - 1)

    def geometric(num: int) -> Iterator[float]:
        return (2 ** (-8 * head / num) for head in range(1, num + 1))

    extra = list(geometric(2 * whole))[::2]
    return list(chain(geometric(whole), extra[: num_heads - whole]))


class AlibiBias(nn.Module):
    """Bias that falls linearly with the distance of a key: -slope * distance / scaling_factor.

    The slopes are the weight of a `Linear`, so that tensor parallelism gives each rank the slopes
    of its heads. Trainable ones start from `xavier_uniform_` and may be negative.

    Args:
        num_heads: Number of attention heads.
        scaling_factor: Divides all distances.
        trainable: Whether the slopes are trained.
    """

    tensor_plan: Final = {"slopes": "colwise"}

    def __init__(
        self, num_heads: int, *, scaling_factor: float = 1.0, trainable: bool = False
    ) -> None:
        super().__init__()
        self.scaling_factor = scaling_factor
        self.trainable = trainable  # also where the weight is frozen later
        self.slopes = nn.Linear(1, num_heads, bias=False)
        self.slopes.weight.requires_grad_(trainable)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the slopes."""
        weight = self.slopes.weight
        if self.trainable:
            nn.init.xavier_uniform_(weight)
            return
        slopes = alibi_slopes(self.slopes.out_features)
        weight.copy_(torch.tensor(slopes, device=weight.device)[:, None])

    def forward(self, length: int, device: torch.device, query: Tensor | None = None) -> Tensor:
        """Return the bias of every pair of query and key.

        `query`: the position of the only query; None = every position is one.

        Shapes:
            query: (1,). Returns: (N, T, T), with `query` (N, 1, T), at least float32; the last
            dimension is the key. With tensor parallelism, N are the heads of this rank.
        """
        dtype = self.slopes.weight.dtype
        with without_autocast(device.type):
            slopes: Tensor = self.slopes(torch.ones((1, 1), dtype=dtype, device=device))
        exact = torch.promote_types(dtype, torch.float32)
        positions = torch.arange(length, device=device, dtype=exact)
        queries = positions if query is None else query
        distances = (queries[:, None] - positions).abs() / -self.scaling_factor
        return slopes.to(exact).reshape(-1, 1, 1) * distances


class RelativeBias(nn.Module):
    """Trained bias per head and bucket of distances, shared by all layers, as in T5's decoder.

    Half of the buckets are of one distance each; the others grow logarithmically, and the last one
    contains all distances from 128 on.

    Source: Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.1.

    Args:
        num_heads: Number of attention heads.
        num_buckets: Number of buckets, 2 to 255.
    """

    tensor_plan: Final = {"buckets": "colwise"}

    def __init__(self, num_heads: int, num_buckets: int = 32) -> None:
        super().__init__()
        self.buckets = nn.Embedding(num_buckets, num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the table."""
        nn.init.xavier_uniform_(self.buckets.weight)

    def forward(self, length: int, device: torch.device, query: Tensor | None = None) -> Tensor:
        """Return the bias of every pair of query and key; for later keys it has no meaning.

        `query`: the position of the only query; None = every position is one.

        Shapes:
            query: (1,). Returns: (N, T, T), with `query` (N, 1, T), at least float32; the last
            dimension is the key. With tensor parallelism, N are the heads of this rank.
        """
        distances = torch.arange(length, device=device)
        if query is not None:
            distances = (query - distances).clamp(min=0)
        by_distance: Tensor = self.buckets(relative_buckets(distances, self.buckets.num_embeddings))
        exact = torch.promote_types(by_distance.dtype, torch.float32)
        by_distance = by_distance.to(exact).transpose(0, 1)
        return by_distance_to_pairs(by_distance) if query is None else by_distance[:, None]


class BidirectionalRelativeBias(nn.Module):
    """Trained bias per head and bucket of distances in both directions, as in T5's encoder.

    Half of the buckets are for keys up to the query, half for later ones; see `RelativeBias`.

    Source: Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.1.

    Args:
        num_heads: Number of attention heads.
        num_buckets: Number of buckets, even, 4 to 255.
    """

    tensor_plan: Final = {"buckets": "colwise"}

    def __init__(self, num_heads: int, num_buckets: int = 32) -> None:
        super().__init__()
        self.buckets = nn.Embedding(num_buckets, num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the table."""
        nn.init.xavier_uniform_(self.buckets.weight)

    def forward(self, length: int, device: torch.device) -> Tensor:
        """Return the bias of every pair of query and key.

        Shapes:
            Returns: (N, T, T), at least float32; the last dimension is the key. With tensor
            parallelism, N are the heads of this rank.
        """
        half = self.buckets.num_embeddings // 2
        buckets = relative_buckets(torch.arange(length, device=device), half)
        by_distance: Tensor = self.buckets(torch.stack((buckets, buckets + half)))
        exact = torch.promote_types(by_distance.dtype, torch.float32)
        earlier, later = by_distance.to(exact).transpose(1, 2).unbind()
        later = functional.pad(later[:, 1:], (1, 0))  # distance 0 is that of earlier keys
        return by_distance_to_pairs(earlier) + by_distance_to_pairs(later).transpose(1, 2)


def relative_buckets(distances: Tensor, num_buckets: int) -> Tensor:
    """Return the bucket of each distance.

    Shapes:
        distances: (...) integer, >= 0. Returns: the same.
    """
    num_exact = num_buckets // 2
    ratio = torch.log(distances.clamp(min=1).float() / num_exact)
    ratio = ratio / math.log(_MAX_DISTANCE / num_exact) * (num_buckets - num_exact)
    grown = (num_exact + ratio.long()).clamp(max=num_buckets - 1)
    return torch.where(distances < num_exact, distances, grown)


def by_distance_to_pairs(by_distance: Tensor) -> Tensor:
    """Return values of (query, key) from values by distance = query - key, for key <= query.

    Only views, copies and padding: gradients are sums in a fixed order, and no index is needed.
    Later keys get 0.

    Shapes:
        by_distance: (N, T). Returns: (N, T, T).
    """
    num, length = by_distance.shape
    # In rows of 2T that become rows of 2T - 1, each is the one above, moved right by one.
    zeros = by_distance.new_zeros((num, length))
    row = torch.cat((by_distance[:, :1], zeros, by_distance[:, 1:].flip(-1)), dim=-1)
    rows = row[:, None].expand(num, length, 2 * length).reshape(num, -1)
    pairs = rows[:, : length * (2 * length - 1)].reshape(num, length, 2 * length - 1)
    return pairs[..., :length]


def fixed_positions(positions: Tensor, size: int) -> Tensor:
    """Return constant position embeddings: channels 2i and 2i + 1 are a sine and a cosine.

    Their frequencies are exp(-i * ln(10000) / (H // 2 - 1)). A last odd channel is 0.

    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.5, with the
    frequencies of its code.

    Shapes:
        positions: (...) integer. `size` is H. Returns: (..., H), float32.
    """
    num = size // 2
    steps = torch.arange(num, device=positions.device, dtype=torch.float32)
    frequencies = torch.exp(steps * (-math.log(10000.0) / max(num - 1, 1)))
    angles = positions[..., None].float() * frequencies
    waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    return functional.pad(waves, (0, size % 2))
