"""Batches that models of `transformers` would take for something else, or cannot take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor
from torch.nn import Module

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.hugging_face.labels import largest, mostly_next, other_padding
from modelzoo_trainer.zoo.models.hugging_face.causality import reads_last_token
from modelzoo_trainer.zoo.models.masks import SPAN_KEY

_MASK: Final = "attention_mask"
_OF_SEQUENCES: Final = "AutoModelForSequenceClassification"
_OF_CLASSES: Final = (
    _OF_SEQUENCES,
    "AutoModelForAudioClassification",
    "AutoModelForImageClassification",
    "AutoModelForTokenClassification",
)
FLOAT_LABELS: Final = ("multi_label_classification", "regression")
"""Values of `problem_type` with which labels are numbers, also if they are integers."""


def check_batch(model: Module, auto_class: str, batch: Mapping[str, Any]) -> None:
    """Check the values of a batch in host memory.

    Args:
        model: A model of `transformers`.
        auto_class: The class that made it.
        batch: Arguments of its forward.

    Raises:
        ConfigError: If its labels are the next tokens, documents are packed, or the model does not
            know its tokens, its classes or the padding.
    """
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if SPAN_KEY in batch or _are_next_tokens(ids, labels, batch.get(_MASK)):
        raise ConfigError(
            f"The labels of the first batch are the next tokens, as the data processors for "
            f"language models here make them, and {_MASK} is their weight; "
            f"{type(model).__name__} would take both for something else. Use name: hf_causal_lm "
            f"for a language model, else another data processor."
        )
    config: Any = model.config
    check_tokens(model, ids)
    if auto_class in _OF_CLASSES:
        _check_classes(config, labels)
    if auto_class == _OF_SEQUENCES and reads_last_token(config) and _has_values(ids):
        _check_padding(config, ids, batch.get(_MASK))


def check_tokens(model: Module, ids: Any) -> None:
    """Check that a model has all tokens of a batch in host memory.

    Raises:
        ConfigError: If there is one beyond its vocabulary.
    """
    get = getattr(model, "get_input_embeddings", None)
    if get is None or not _has_values(ids):  # some models without tokens refuse the call
        return
    num = getattr(get(), "num_embeddings", None)
    if isinstance(num, int) and largest(ids) >= num:
        raise ConfigError(
            f"The first batch has the token {largest(ids)}, but the vocabulary of the model has "
            f"{num} (0 to {num - 1}). Use the tokenizer of the model, or enlarge it: "
            f"resize_token_embeddings: {largest(ids) + 1} or more, the size of the tokenizer; a "
            f"model from scratch has vocab_size in config."
        )


def is_planned(tensor: Any) -> bool:
    """Return whether a tensor belongs to a plan: it has a shape, but no values."""
    return torch._guards.detect_fake_mode([tensor]) is not None


def _check_classes(config: Any, labels: Any) -> None:
    """Check that integers as labels are classes of the model."""
    num = config.num_labels
    is_class = isinstance(labels, Tensor) and not labels.is_floating_point() and num > 1
    if not is_class or getattr(config, "problem_type", None) in FLOAT_LABELS:
        return
    if not is_planned(labels) and largest(labels) >= num:
        raise ConfigError(
            f"The first batch has the label {largest(labels)}, but num_labels is {num} (0 to "
            f"{num - 1}). Set num_labels in config or config_overrides, or correct the labels."
        )


def _are_next_tokens(ids: Any, labels: Any, mask: Any) -> bool:
    """Return whether most labels that count are the tokens after theirs."""
    if not _has_values(ids) or not isinstance(labels, Tensor) or ids.shape != labels.shape:
        return False
    weights = mask if isinstance(mask, Tensor) and mask.shape == labels.shape else None
    return mostly_next(ids, labels, weights)


def _has_values(ids: Any) -> TypeGuard[Tensor]:
    """Return whether these are tokens with values."""
    return isinstance(ids, Tensor) and ids.dim() == 2 and not is_planned(ids)


def _check_padding(config: Any, ids: Tensor, mask: Any) -> None:
    """Check that a model that classifies the last token before the padding finds it."""
    pad = getattr(config, "pad_token_id", None)
    what = f"{config.model_type!r} classifies the last token of a row that is not pad_token_id"
    how = "in config or config_overrides to the padding token of the tokenizer"
    if pad is None:
        if len(ids) > 1:
            raise ConfigError(f"{what}, which its settings do not have. Set pad_token_id {how}.")
        return
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        other = other_padding(ids, mask, pad)
        if other is not None:
            raise ConfigError(
                f"{what} ({pad}), but the first batch is padded with {other}. Set pad_token_id "
                f"({other}) {how}."
            )
