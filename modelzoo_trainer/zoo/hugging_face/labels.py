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
    counts = _counted(labels, weights)
    if not counts.any().item() or (counts & (input_ids != labels)).any().item():
        return 0
    differs = torch.zeros_like(counts)
    differs[:, 1:] = input_ids[:, 1:] != input_ids[:, :-1]
    return int(counts.sum().item()) if (differs & counts).any().item() else 0


def num_next(input_ids: Tensor, labels: Tensor, mask: Tensor | None) -> int:
    """Return at how many positions labels are the next tokens, if these are more than the others.

    0 if at least as many labels are the tokens at their own positions.

    Args:
        input_ids: The tokens, in host memory.
        labels: The labels; -100 does not count.
        mask: 0 where a label does not count; None = all count.

    Shapes:
        input_ids, labels, mask: (B, T) integer.

    Cost:
        Reads values: not for use in a step.
    """
    counts = _counted(labels, mask)
    nexts = int((counts[:, :-1] & (labels[:, :-1] == input_ids[:, 1:])).sum().item())
    return nexts if nexts > int((counts & (labels == input_ids)).sum().item()) else 0


def mostly_next(input_ids: Tensor, labels: Tensor, mask: Tensor | None) -> bool:
    """Return whether most of the labels that count are the next tokens.

    Args:
        input_ids: The tokens, in host memory.
        labels: The labels; -100 does not count.
        mask: 0 where a label does not count; None = all count.

    Shapes:
        input_ids, labels, mask: (B, T) integer.

    Cost:
        Reads values: not for use in a step.
    """
    return 2 * num_next(input_ids, labels, mask) > int(_counted(labels, mask).sum().item())


def other_padding(input_ids: Tensor, mask: Tensor, pad: int) -> int | None:
    """Return a token that padding has, although it is not the model's; None if there is none.

    Args:
        input_ids: The tokens, in host memory.
        mask: 0 for padding.
        pad: The padding token of the model.

    Shapes:
        input_ids, mask: (B, T) integer.

    Cost:
        Reads values: not for use in a step.
    """
    found = input_ids[(mask == 0) & (input_ids != pad)]
    return int(found[0].item()) if found.numel() else None


def largest(values: Tensor) -> int:
    """Return the largest of some integers, at least 0.

    Args:
        values: In host memory.

    Cost:
        Reads values: not for use in a step.
    """
    return max(int(values.max().item()), 0) if values.numel() else 0


def begin_again(position_ids: Tensor, mask: Tensor | None) -> bool:
    """Return whether positions begin again within a row, as in packed documents.

    Args:
        position_ids: The positions, in host memory.
        mask: 0 for padding; None = there is none.

    Shapes:
        position_ids, mask: (B, T) integer.

    Cost:
        Reads values: not for use in a step.
    """
    begins = position_ids[:, 1:] <= position_ids[:, :-1]
    if mask is not None:
        begins = begins & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return bool(begins.any().item())


def _counted(labels: Tensor, weights: Tensor | None) -> Tensor:
    counts = labels != _IGNORED
    return counts if weights is None else counts & (weights != 0)
