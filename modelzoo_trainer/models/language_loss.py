"""Language model loss: cross entropy over the tokens that count.

Dimension letters: B batch, T positions, V vocabulary size.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from modelzoo_trainer.hdf5_format import IGNORED_LABEL

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

    `attention_mask`: the weight of each position, 0 where it does not count; None = all are 1.
    `loss_scaling`: weighted mean over tokens, or weighted sum divided by the number of sequences.

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


def token_losses(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the cross entropy of each label, 0 where it is -100.

    `label_smoothing`: share of a label that is spread evenly over the vocabulary.

    Shapes:
        logits: (B, T, V) floating. labels: (B, T) integer. Returns: (B, T), float32.
    """
    losses = functional.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten().long(),
        ignore_index=IGNORED_LABEL,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return losses.view(labels.shape)


def label_weights(batch: Mapping[str, Tensor], key: str) -> Tensor:
    """Return the weight of each label, 0 where it is -100.

    `key`: that of the weights in the batch; without it, they are 1.

    Shapes:
        Returns: as `labels` of the batch, float32.
    """
    counts = (batch["labels"] != IGNORED_LABEL).float()
    return counts * batch[key] if key in batch else counts


def token_accuracy(logits: Tensor, labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the fraction of tokens, by weight, whose label has the largest logit.

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
    weights = attention_mask.flatten()
    # The product alone would keep non-finite values: 0 * nan is nan.
    return values.where(weights != 0, 0.0) * weights


def validation_means(
    outputs: Mapping[str, Any],
    batch: Mapping[str, Tensor],
    *,
    loss_scaling: LossScaling,
    loss_weight: float,
) -> dict[str, tuple[Tensor, Tensor | int, Callable[[Tensor], Tensor] | None]]:
    """Return the metrics that are means over the tokens of a validation; see `ModelEvalMetrics`.

    These are `accuracy`, and `lm_perplexity` = exp(mean cross entropy), which is derived from the
    loss. Without `accuracy` in the output, none.

    Shapes:
        Values and weights: (), or an int.
    """
    if "accuracy" not in outputs:
        return {}
    loss: Tensor = outputs["loss"].detach()
    num_items, attention_mask = outputs["num_items"], batch.get("attention_mask")
    num_tokens: Tensor | int = batch["labels"].numel()
    if attention_mask is not None:
        num_tokens = attention_mask.sum(dtype=torch.float32)
    found: dict[str, tuple[Tensor, Tensor | int, Callable[[Tensor], Tensor] | None]] = {}
    found["accuracy"] = (outputs["accuracy"], num_tokens, None)
    if loss_scaling == "batch_size":
        if loss_weight == 0:  # the cross entropy is unknown
            return found
        at_least_one = num_tokens.clamp(min=1) if isinstance(num_tokens, Tensor) else num_tokens
        loss = loss * num_items / loss_weight / at_least_one
    return found | {"lm_perplexity": (loss, num_tokens, torch.exp)}
