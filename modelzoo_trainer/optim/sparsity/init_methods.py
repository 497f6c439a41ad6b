"""Initial masks, as an ordering of elements without data-dependent shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

_WORD: Final = 0xFFFFFFFF
_FACTOR: Final = 0x45D9F3B  # odd: multiplication is invertible; small: no overflow of 64 bits


@dataclass(frozen=True, slots=True)
class RankingGroups:
    """How a tensor is divided into groups that are ranked separately."""

    dim: int = 0  # the dimension that is divided
    num: int = 1  # the number of groups, of equal size

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the elements of each group, (num, elements of a group)."""
        return tensor.movedim(self.dim, 0).reshape(self.num, -1)

    def whole(self, rows: Tensor, like: Tensor) -> Tensor:
        """Return these rows in the shape of `like`."""
        return rows.reshape(like.movedim(self.dim, 0).shape).movedim(0, self.dim)


def ranks(scores: Tensor) -> Tensor:
    """Return the rank of each element in its row: 0 = largest; ties keep their order.

    `scores`: (rows, elements).

    Returns:
        Same shape, int64.
    """
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    positions = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, positions)


def random_scores(rows: Tensor, key: Tensor) -> Tensor:
    """Return distinct pseudorandom numbers, one for each element.

    A function of the key and the position: no generator is used, and every device and process has
    the same numbers.

    `rows`: (rows, elements), fewer than 2**32 in total. `key`: (2,), int64, each in [0, 2**32).

    Returns:
        In the shape of `rows`, int64, in [0, 2**32).
    """
    positions = torch.arange(rows.numel(), device=rows.device).reshape(rows.shape)
    return _mixed(_mixed(positions ^ key[0]) ^ key[1])


def _mixed(words: Tensor) -> Tensor:
    """Mix the bits of 32-bit words; a bijection."""
    for _ in range(2):
        words = ((words ^ (words >> 16)) * _FACTOR) & _WORD
    return words ^ (words >> 16)


InitMethod = Literal["random", "topk", "from_zeros", "checkerboard"]
InitFunction = Callable[[Tensor, RankingGroups, Tensor, Tensor], Tensor]


def _random(weight: Tensor, layout: RankingGroups, num_kept: Tensor, key: Tensor) -> Tensor:
    return ranks(random_scores(layout.rows(weight), key)) < num_kept


def _topk(weight: Tensor, layout: RankingGroups, num_kept: Tensor, key: Tensor) -> Tensor:
    return ranks(layout.rows(weight.abs())) < num_kept


def _from_zeros(weight: Tensor, layout: RankingGroups, num_kept: Tensor, key: Tensor) -> Tensor:
    return layout.rows(weight) != 0


def _checkerboard(weight: Tensor, layout: RankingGroups, num_kept: Tensor, key: Tensor) -> Tensor:
    lines = weight.shape[0]
    line = torch.arange(lines, device=weight.device).unsqueeze(1)
    size = weight.numel() // lines
    place = torch.arange(size, device=weight.device).unsqueeze(0)
    shifted = line * size + (place + line) % size  # each line begins one position later
    rows = layout.rows(shifted.reshape(weight.shape))
    number = ranks(-rows)
    length = rows.shape[1]
    return (number + 1) * num_kept // length > number * num_kept // length


INIT_METHODS: Final[dict[str, InitFunction]] = {
    "random": _random,
    "topk": _topk,
    "from_zeros": _from_zeros,
    "checkerboard": _checkerboard,
}
"""From a weight, its layout, the number to keep per row, (), and a key, (2,), to a mask in the
shape of the rows: random, largest magnitude, nonzero ones, or evenly spread."""
