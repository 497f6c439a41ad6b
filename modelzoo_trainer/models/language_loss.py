"""Language model loss: cross entropy over the tokens that count.

Dimension letters: B batch, T positions, V vocabulary size.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

LossScaling = Literal["num_tokens", "batch_size"]


def language_loss(
    logits: Tensor,
    labels: Tensor,
    attention_mask: Tensor | None,
    *,
    loss_scaling: LossScaling = "num_tokens",
    loss_weight: float = 1.0,
) -> tuple[Tensor, Tensor | int]:
    """Return the loss and the number of items that it is averaged over.

    `attention_mask`: 1 where a position counts, 0 where not; None = all count. `loss_scaling`: mean
    over counted tokens, or sum divided by the number of sequences.

    Shapes:
        logits: (B, T, V) floating. labels, attention_mask: (B, T) integer.
        Returns: loss (), float32; number of items () float32 on the same device, or an int if
        it follows from the shapes.

    Cost:
        No host read, no data-dependent shape.
    """
    scores, targets = logits.flatten(0, 1).float(), labels.flatten().long()
    if loss_scaling == "num_tokens" and attention_mask is None:
        return functional.cross_entropy(scores, targets), labels.numel()
    losses = functional.cross_entropy(scores, targets, reduction="none")
    losses = _masked(losses, attention_mask)
    if loss_scaling == "batch_size" or attention_mask is None:
        return losses.sum() * (loss_weight / labels.shape[0]), labels.shape[0]
    num_tokens = attention_mask.sum(dtype=torch.float32)
    return losses.sum() / num_tokens.clamp(min=1), num_tokens


def token_accuracy(logits: Tensor, labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the fraction of counted tokens whose logit is the largest.

    Shapes:
        As for `language_loss`. Returns: (), float32.
    """
    hits = (logits.argmax(dim=-1) == labels).flatten().float()
    if attention_mask is None:
        return hits.mean()
    return _masked(hits, attention_mask).sum() / attention_mask.sum().clamp(min=1)


def _masked(values: Tensor, attention_mask: Tensor | None) -> Tensor:
    if attention_mask is None:
        return values
    # A product would keep non-finite values: 0 * nan is nan.
    return values.where(attention_mask.flatten() != 0, 0.0)
