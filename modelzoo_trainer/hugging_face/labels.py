"""Two forms of labels of language models: the next tokens, or the tokens themselves.

Dimension letters: B batch, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

_IGNORED: int = -100


def num_repeated(input_ids: Tensor, labels: Tensor, weights: Tensor | None) -> int:
    """Return at how many positions labels are the tokens themselves, if they are at all that count.

    0 also if all tokens that count equal their predecessors, so that both forms are the same.

    Args:
        input_ids: The tokens, in host memory.
        labels: The labels; -100 does not count.
        weights: 0 where a label does not count; None = all count.

    Shapes:
        input_ids, labels, weights: (B, T) integer.

    Cost:
        Reads values: not for use in a step.
    """
    counts = labels != _IGNORED
    if weights is not None:
        counts = counts & (weights != 0)
    if not counts.any().item() or (counts & (input_ids != labels)).any().item():
        return 0
    differs = torch.zeros_like(counts)
    differs[:, 1:] = input_ids[:, 1:] != input_ids[:, :-1]
    return int(counts.sum().item()) if (differs & counts).any().item() else 0
