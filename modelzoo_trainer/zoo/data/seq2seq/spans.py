"""T5's objective: spans of a text are replaced by sentinels, and are to be predicted.

Source: Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 3.1.4.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

_DENSITY: Final = 0.15  # share of the tokens that is replaced
_MEAN_SPAN: Final = 3  # tokens of a span
SHORTEST: Final = 2
"""Tokens of the shortest text: one that stays and one that is replaced."""


def counts_of(length: int) -> tuple[int, int]:
    """Return how many tokens of a text are replaced, and in how many spans.

    `length`: of the text, at least 2.
    """
    replaced = min(max(round(length * _DENSITY), 1), length - 1)
    spans = min(max(round(replaced / _MEAN_SPAN), 1), replaced, length - replaced)
    return replaced, spans


def longest_text(input_length: int) -> int:
    """Return the length of text that fills an input: text that stays, sentinels and one token.

    `input_length`: at least 3.
    """
    low, high = SHORTEST, 2 * input_length
    while low < high:  # the length of the input grows with that of the text
        length = (low + high) // 2
        replaced, spans = counts_of(length)
        if length - replaced + spans + 1 >= input_length:
            high = length
        else:
            low = length + 1
    return low


def corrupt(tokens: Tokens, last_id: int, generator: torch.Generator) -> tuple[Tokens, Tokens]:
    """Replace spans by sentinels; return the input, and the spans, each after its sentinel.

    Args:
        tokens: The text, at least 2 tokens.
        last_id: Id of the first sentinel; the ids of the others follow downwards.
        generator: Draws the lengths of the spans and of the text between them.

    Shapes:
        tokens: (length,). With r tokens replaced in s spans, returns: (length - r + s,), (r + s,).
    """
    replaced, spans = counts_of(len(tokens))
    stays = _parts(len(tokens) - replaced, spans, generator)
    leaves = _parts(replaced, spans, generator)
    ends = np.cumsum(np.stack((stays, leaves), axis=1).ravel())
    parts = np.split(tokens, ends[:-1])
    inputs, targets = [], []
    for number in range(spans):
        sentinel = np.array([last_id - number], dtype=np.int32)
        inputs += [parts[2 * number], sentinel]
        targets += [sentinel, parts[2 * number + 1]]
    return np.concatenate(inputs), np.concatenate(targets)


def _parts(num: int, parts: int, generator: torch.Generator) -> NDArray[np.int64]:
    """Divide `num` into random parts, each at least 1; every division is equally likely."""
    # Not numpy's generator: its numbers may change between versions.
    cuts = torch.randperm(num - 1, generator=generator)[: parts - 1].numpy()
    bounds = np.concatenate(([0], np.sort(cuts) + 1, [num]))
    return np.diff(bounds).astype(np.int64)
