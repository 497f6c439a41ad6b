"""Language model loss: cross entropy over the tokens that count.

Dimension letters: B batch, T positions, V vocabulary size.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from modelzoo_trainer.zoo.rows.hdf5_format import IGNORED_LABEL

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

    `attention_mask`: the weight of each position, 0 where it does not count; None = all are 1. The
    weight of a label of -100 is always 0.
    `loss_scaling`: weighted mean over tokens, or weighted sum divided by the number of sequences.

    Shapes:
        logits: (B, T, V) floating. labels, attention_mask: (B, T) integer.
        Returns: loss (), float32; number of items () float32 on the same device, or an int if
        it follows from the shapes.

    Cost:
        No host read, no data-dependent shape.
    """
    if loss_scaling == "num_tokens" and attention_mask is None:
        return mean_loss(logits, labels)
    losses = _masked(token_losses(logits, labels).flatten(), attention_mask)
    return reduced_loss(
        losses.sum(), labels, attention_mask, loss_scaling=loss_scaling, loss_weight=loss_weight
    )


def reduced_loss(
    total: Tensor,
    labels: Tensor,
    attention_mask: Tensor | None,
    *,
    loss_scaling: LossScaling = "num_tokens",
    loss_weight: float = 1.0,
) -> tuple[Tensor, Tensor | int]:
    """Return the loss and the number of items, as `language_loss`, from the weighted sum.

    Shapes:
        total: (), floating. labels, attention_mask: (B, T) integer.
    """
    if loss_scaling == "batch_size":
        return total * (loss_weight / labels.shape[0]), labels.shape[0]
    num_tokens = sum_of_weights(labels, attention_mask)
    return total / num_tokens.clamp(min=1), num_tokens


def mean_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy of the labels that are not -100, and their number.

    Without such a label both are 0; the mean that torch computes would be NaN.

    Shapes:
        logits: (..., V) floating. labels: (...) integer. Returns: twice (), float32.
    """
    num = sum_of_weights(labels, None)
    total = functional.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten().long(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )
    return total / num.clamp(min=1), num


def sum_of_weights(labels: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum of the weights of labels; -100 has weight 0.

    `weights`: None = all are 1.

    Shapes:
        labels, weights: the same. Returns: (), float32.
    """
    return counted_labels(labels, weights).sum(dtype=torch.float32)


def counted_labels(labels: Tensor, weights: Tensor | None) -> Tensor:
    """Return the weights of labels; -100 has weight 0; bool if `weights` is None.

    Shapes:
        labels, weights: the same. Returns: the same.
    """
    counts = labels != IGNORED_LABEL
    return counts if weights is None else counts * weights


def num_counted(labels: object, weights: object = None) -> Tensor | None:
    """Return the number of labels that are not -100 and have a weight, for `count_labels`.

    None if the labels are no integers, or the weights do not fit them.

    Shapes:
        Returns: (), int64.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    counts = labels != IGNORED_LABEL
    if isinstance(weights, Tensor):
        if weights.shape != labels.shape:
            return None
        counts = counts & (weights != 0)
    return counts.sum()


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

    `key`: the key of the weights in the batch; without it, they are 1.

    Shapes:
        Returns: as `labels` of the batch, float32.
    """
    counts = (batch["labels"] != IGNORED_LABEL).float()
    return counts * batch[key] if key in batch else counts


def token_accuracy(logits: Tensor, labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the fraction of labels, by weight, that have the largest logit.

    Shapes:
        logits: (..., V). labels, attention_mask: (...). Returns: (), float32.
    """
    hits = logits.argmax(dim=-1) == labels  # never of a label of -100
    return share_of_hits(hits, labels, attention_mask)


def share_of_hits(hits: Tensor, labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the fraction of labels, by weight, that are hits.

    Shapes:
        hits: bool, as labels and attention_mask. Returns: (), float32.
    """
    num_tokens = sum_of_weights(labels, attention_mask)
    total = _masked(hits.flatten().float(), attention_mask).sum()
    return total / num_tokens.clamp(min=1)


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
    num_items = outputs["num_items"]
    num_tokens = sum_of_weights(batch["labels"], batch.get("attention_mask"))
    found: dict[str, tuple[Tensor, Tensor | int, Callable[[Tensor], Tensor] | None]] = {}
    found["accuracy"] = (outputs["accuracy"], num_tokens, None)
    if loss_scaling == "batch_size":
        if loss_weight == 0:  # the cross entropy is unknown
            return found
        loss = loss * num_items / loss_weight / num_tokens.clamp(min=1)
    return found | {"lm_perplexity": (loss, num_tokens, torch.exp)}
