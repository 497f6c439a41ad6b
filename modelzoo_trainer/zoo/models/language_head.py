"""The head of a language model: the loss of labels, and logits where something asks for them.

Dimension letters: B batch, T positions, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from modelzoo_trainer.zoo.models.head_chunks import HeadInputs, HeadSettings, VocabularyShards
from modelzoo_trainer.zoo.models.head_loss import label_losses, sum_of_losses
from modelzoo_trainer.zoo.models.language_loss import counted_labels, token_losses

LOGITS: Final = "logits"


class WithOptionalLogits:
    """Base class of models that return logits only where something asks for them.

    A trainer sets `requested_outputs` to what its callbacks read. Without a trainer, set it to
    `("logits",)` to have logits in training, too, or to `()` to have none in evaluation either.
    """

    optional_outputs: ClassVar[tuple[str, ...]] = (LOGITS,)
    """Outputs that are computed on request."""
    requested_outputs: tuple[str, ...] | None = None
    """The requested ones; None = in training none, in evaluation all."""

    training: bool

    @property
    def wants_logits(self) -> bool:
        """Whether the output has logits."""
        requested = self.requested_outputs
        return not self.training if requested is None else LOGITS in requested


class Scored(NamedTuple):
    """The losses of labels."""

    total: Tensor
    """(): the weighted sum, float32."""
    losses: Tensor
    """(B, T): of labels without their weights; without a gradient."""
    hits: Tensor | None
    """(B, T), bool: whether a label that counts has the largest logit."""
    logits: Tensor | None
    """(B, T, V), where they were requested, or the head had to be called as a module."""


def score(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor,
    settings: HeadSettings,
    *,
    wants_logits: bool = False,
    wants_hits: bool = False,
) -> Scored:
    """Return the losses of labels, without the logits of all tokens where it is possible.

    A head with adapters, hooks or a forward pass of its own is called as a module, with the logits
    of all tokens.

    Args:
        head: The linear layer over the vocabulary.
        hidden: What it gets.
        labels: The labels; -100 never counts.
        weights: Of the labels; bool or any number type.
        settings: How the loss is computed.
        wants_logits: Whether logits are requested.
        wants_hits: Whether `hits` is.

    Shapes:
        hidden: (B, T, H). labels, weights: (B, T).

    Cost:
        No host read, no data-dependent shape.
    """
    weights = counted_labels(labels, weights).float()
    if not wants_logits and is_plain(head):
        found = sum_of_losses(
            _inputs(head, hidden, labels, weights),
            settings,
            wants_hits=wants_hits,
            shards=_shards(head),
        )
        hits = None if found.hits is None else found.hits.view(labels.shape)
        return Scored(found.total, found.losses.view(labels.shape), hits, None)
    logits = logits_of(head, hidden, settings)
    losses = token_losses(logits, labels, label_smoothing=settings.label_smoothing)
    # A product alone would keep non-finite values: 0 * nan is nan.
    total = (losses.where(weights != 0, 0.0) * weights).sum()
    hits = (logits.argmax(dim=-1) == labels) & (weights != 0) if wants_hits else None
    return Scored(total, losses.detach(), hits, logits)


def losses_of(head: nn.Module, hidden: Tensor, labels: Tensor, settings: HeadSettings) -> Tensor:
    """Return the loss of each label, 0 where it is -100, as `score` does.

    Shapes:
        hidden: (B, T, H). labels: (B, T). Returns: (B, T), float32.
    """
    if not is_plain(head):
        logits = logits_of(head, hidden, settings)
        return token_losses(logits, labels, label_smoothing=settings.label_smoothing)
    inputs = _inputs(head, hidden, labels, counted_labels(labels, None).float())
    return label_losses(inputs, settings, shards=_shards(head)).view(labels.shape)


def logits_of(head: nn.Module, hidden: Tensor, settings: HeadSettings) -> Tensor:
    """Return the logits.

    Shapes:
        hidden: (..., H). Returns: (..., V).
    """
    logits: Tensor = head(hidden)
    if settings.scale != 1:
        logits = logits * settings.scale
    if settings.softcap is not None:
        logits = torch.tanh(logits / settings.softcap) * settings.softcap
    return logits


def is_plain(head: nn.Module) -> bool:
    """Return whether calling a head is a product with its weight, and nothing else."""
    if type(head) is not nn.Linear or "forward" in vars(head) or _has_any_global_hook():  # type: ignore[no-untyped-call]
        return False
    shards, num = _shards(head), num_hooks(head)
    return num == 0 if shards is None else shards.is_usable and num == shards.num_hooks


def num_hooks(module: nn.Module) -> int:
    """Return how many hooks of its own a module has."""
    forward = len(module._forward_pre_hooks) + len(module._forward_hooks)
    return forward + len(module._backward_hooks) + len(module._backward_pre_hooks)


def _shards(head: Any) -> VocabularyShards | None:
    found: VocabularyShards | None = getattr(head, "output_shards", None)
    return found


def _inputs(head: Any, hidden: Tensor, labels: Tensor, weights: Tensor) -> HeadInputs:
    weight, bias, shards = head.weight, head.bias, _shards(head)
    if shards is not None:
        weight = shards.local(weight)
        bias = None if bias is None else shards.local(bias)
    return HeadInputs(hidden.flatten(0, -2), weight, bias, labels.flatten(), weights.flatten())
