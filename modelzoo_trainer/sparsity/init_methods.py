"""Which weights are there in the beginning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import torch
from torch import Tensor

from modelzoo_trainer.sparsity.ranking import Layout, random_scores, ranks

InitMethod = Literal["random", "topk", "from_zeros", "checkerboard"]
InitFunction = Callable[[Tensor, Layout, Tensor, Tensor], Tensor]


def _random(weight: Tensor, layout: Layout, num_kept: Tensor, key: Tensor) -> Tensor:
    return ranks(random_scores(layout.rows(weight), key)) < num_kept


def _topk(weight: Tensor, layout: Layout, num_kept: Tensor, key: Tensor) -> Tensor:
    return ranks(layout.rows(weight.abs())) < num_kept


def _from_zeros(weight: Tensor, layout: Layout, num_kept: Tensor, key: Tensor) -> Tensor:
    return layout.rows(weight) != 0


def _checkerboard(weight: Tensor, layout: Layout, num_kept: Tensor, key: Tensor) -> Tensor:
    lines = weight.shape[0]
    line = torch.arange(lines, device=weight.device).unsqueeze(1)
    size = weight.numel() // lines
    place = torch.arange(size, device=weight.device).unsqueeze(0)
    shifted = line * size + (place + line) % size  # each line begins one place later
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
"""From a weight, its layout, the number that stays of each row, (), and a key, (2,), to a mask of
the shape of the rows: random, those of the greatest magnitude, those that are not zero, or evenly
spread."""
