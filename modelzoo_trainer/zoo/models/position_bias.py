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

from modelzoo_trainer.zoo.models.autocast import without_autocast

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
        two_sided: Whether later keys are seen as well.
    """

    tensor_plan: Final = {"slopes": "colwise"}

    def __init__(
        self,
        num_heads: int,
        *,
        scaling_factor: float = 1.0,
        trainable: bool = False,
        two_sided: bool = False,
    ) -> None:
        super().__init__()
        self.scaling_factor = scaling_factor
        self.two_sided = two_sided
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

    def forward(self, length: int, device: torch.device) -> Tensor:
        """Return the bias by distance = query - key: of 0, ..., T - 1, or of -(T - 1), ..., T - 1.

        Shapes:
            Returns: (N, T), two-sided (N, 2 T - 1), at least float32. With tensor parallelism, N
            are the heads of this rank.
        """
        dtype = self.slopes.weight.dtype
        with without_autocast(device.type):
            slopes: Tensor = self.slopes(torch.ones((1, 1), dtype=dtype, device=device))
        exact = torch.promote_types(dtype, torch.float32)
        first = 1 - length if self.two_sided else 0
        distances = torch.arange(first, length, device=device, dtype=exact).abs()
        return slopes.to(exact).reshape(-1, 1) * (distances / -self.scaling_factor)


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

    def forward(self, length: int, device: torch.device) -> Tensor:
        """Return the bias by distance = query - key: of 0, ..., T - 1.

        Shapes:
            Returns: (N, T), at least float32. With tensor parallelism, N are the heads of this
            rank.
        """
        buckets = relative_buckets(torch.arange(length, device=device), self.buckets.num_embeddings)
        by_distance: Tensor = self.buckets(buckets)
        return by_distance.to(torch.promote_types(by_distance.dtype, torch.float32)).transpose(0, 1)


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
        """Return the bias by distance = query - key: of -(T - 1), ..., T - 1.

        Shapes:
            Returns: (N, 2 T - 1), at least float32. With tensor parallelism, N are the heads of
            this rank.
        """
        half = self.buckets.num_embeddings // 2
        buckets = relative_buckets(torch.arange(length, device=device), half)
        later = buckets[1:].flip(0) + half
        by_distance: Tensor = self.buckets(torch.cat((later, buckets)))
        return by_distance.to(torch.promote_types(by_distance.dtype, torch.float32)).transpose(0, 1)


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
