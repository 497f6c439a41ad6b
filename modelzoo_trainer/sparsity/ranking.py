"""Orders of a tensor's elements, in shapes that depend on no value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_WORD: Final = 0xFFFFFFFF
_FACTOR: Final = 0x45D9F3B  # odd: multiplying by it loses nothing; small: no overflow of 64 bits


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is divided into groups that are ranked apart.

    Args:
        dim: The dimension that is divided.
        num: The number of groups, of equal size.
    """

    dim: int = 0
    num: int = 1

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the elements of each group, (num, elements of a group)."""
        return tensor.movedim(self.dim, 0).reshape(self.num, -1)

    def whole(self, rows: Tensor, like: Tensor) -> Tensor:
        """Return what has the shape of `like` and these rows."""
        return rows.reshape(like.movedim(self.dim, 0).shape).movedim(0, self.dim)


def ranks(scores: Tensor) -> Tensor:
    """Return the place of each element in its row: 0 for the greatest; the first of equals first.

    Args:
        scores: (rows, elements).

    Returns:
        Of the same shape, int64.
    """
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    places = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def random_scores(rows: Tensor, key: Tensor) -> Tensor:
    """Return numbers that look random, different from each other, for each element.

    A function of the key and the place alone: no generator is used or changed, and every device
    and process has the same.

    Args:
        rows: (rows, elements), fewer than 2**32 in all.
        key: (2,), int64, each in [0, 2**32).

    Returns:
        Of the shape of `rows`, int64, in [0, 2**32).
    """
    places = torch.arange(rows.numel(), device=rows.device).reshape(rows.shape)
    return _mixed(_mixed(places ^ key[0]) ^ key[1])


def _mixed(words: Tensor) -> Tensor:
    """Return words of 32 bits in which each bit of the given ones has had its say; one to one."""
    for _ in range(2):
        words = ((words ^ (words >> 16)) * _FACTOR) & _WORD
    return words ^ (words >> 16)
