"""T5 and the Transformer: an encoder, and a decoder that also sees the encoder's states.

https://arxiv.org/abs/1910.10683, https://arxiv.org/abs/1706.03762

Dimension letters: B batch, S positions of the input, T positions of the output, V vocabulary,
H width.
"""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from typing_extensions import override

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.head_chunks import HeadSettings
from modelzoo_trainer.zoo.models.language_head import (
    LOGITS,
    Scored,
    WithOptionalLogits,
    score,
)
from modelzoo_trainer.zoo.models.language_loss import label_weights, num_counted
from modelzoo_trainer.zoo.models.masks import hidden_padding
from modelzoo_trainer.zoo.models.parametrization import LrAdjustmentGroup
from modelzoo_trainer.zoo.models.t5.engines import published_name, stack_tensor_plan
from modelzoo_trainer.zoo.models.t5.layers import Stack, Step, draw
from modelzoo_trainer.zoo.models.t5.scaling import (
    embedding_initializer,
    lm_head_initializer,
    logits_scale,
    lr_groups,
)
from modelzoo_trainer.zoo.models.t5.settings import T5Settings

log = logging.getLogger("modelzoo_trainer.models")

_NEEDED: Final = ("input_ids", "decoder_input_ids", "labels")
_SOURCE_MASK: Final = "attention_mask"
_TARGET_MASK: Final = "decoder_attention_mask"
_WEIGHT: Final = "loss_weight"


class T5(WithOptionalLogits, T5Settings, nn.Module):
    """An encoder-decoder model: T5, or with other settings the Transformer."""

    builds_without_values = True
    """Whether `reset_steps` draws all initial values, so that the constructor need not."""

    published_name = staticmethod(published_name)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        nn.Module.__init__(self)
        self.warn_of_unused(stacklevel=3)
        size = self.d_model
        self.token_embeddings = nn.Embedding(self.num_inputs, size)
        self.target_embeddings: nn.Embedding | None = None
        if not self.share_encoder_decoder_embedding:
            self.target_embeddings = nn.Embedding(self.num_outputs, size)
        self.encoder = Stack(self, is_decoder=False)
        self.decoder = Stack(self, is_decoder=True)
        self.lm_head = nn.Linear(size, self.num_outputs, bias=False)
        self._logits_scale = logits_scale(self)
        self._has_said = False
        self.reset_parameters()

    @property
    def lr_adjustment_groups(self) -> Mapping[str, LrAdjustmentGroup]:
        """Groups of parameters with learning rate factors, by name; all 1 without muP."""
        return lr_groups(self)

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Tensor parallelism: how layers are split, by module name patterns, as in decoders."""
        plan = stack_tensor_plan(self.encoder, "encoder")
        plan |= stack_tensor_plan(self.decoder, "decoder")
        plan |= {"token_embeddings": "rowwise", "lm_head": "colwise_gather"}
        if self.target_embeddings is not None:
            plan["target_embeddings"] = "rowwise"
        return plan

    @property
    def _of_targets(self) -> nn.Embedding:
        found = self.target_embeddings
        return self.token_embeddings if found is None else found

    def reset_parameters(self) -> None:
        """Initialize all weights and tie shared ones; also after `to_empty`."""
        if self.share_embedding_weights:
            self.lm_head.weight = self._of_targets.weight
        for _, reset in self.reset_steps():
            reset()

    def reset_steps(self) -> Iterator[Step]:
        """Yield the parts of the model, each with the function that initializes it."""
        for embedding in (self.token_embeddings, self.target_embeddings):
            if embedding is not None:
                yield embedding, partial(draw, embedding, embedding_initializer(self))
        yield from self.encoder.initial_steps()
        yield from self.decoder.initial_steps()
        if not self.share_embedding_weights:
            yield self.lm_head, partial(draw, self.lm_head, lm_head_initializer(self))

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the loss and the number of items that it is averaged over.

        With c the cross entropy of a label, w = `decoder_attention_mask`, 0 where the label is
        -100, and B sequences, the loss is

            batch_size               lm_loss_weight * sum(w * c) / B
            num_masked               sum(w * c) / sum(w)
            precomputed_num_masked   sum(loss_weight * w * c) / B

        Args:
            batch: `input_ids`; `attention_mask`, 0 for tokens that nothing sees, missing = none;
                `decoder_input_ids`, the labels shifted by one; `labels`;
                `decoder_attention_mask`, the weight of each label, missing = 1, which does not
                restrict attention; `loss_weight` for `precomputed_num_masked`.

        Returns:
            `loss`, `num_items`; `logits` where they are requested; in eval mode also `accuracy_lm`
            and `lm_loss` (the mean cross entropy of labels that count), from which
            `ModelEvalMetrics` also logs `perplexity_lm`.

        Shapes:
            input_ids, attention_mask: (B, S). decoder_input_ids, decoder_attention_mask, labels:
            (B, T). loss_weight: (B, 1). logits: (B, T, V). loss and metrics: (), float32.
            num_items: B, an int; with `num_masked` () float32.

        Cost:
            No host read, no data-dependent shape.

        Raises:
            ConfigError: If the batch lacks something, is longer than the model's positions, or has
                shapes that do not fit each other.
        """
        self._check_batch(batch)
        padding = hidden_padding(batch.get(_SOURCE_MASK))
        sources = self.encoder(self.token_embeddings(batch["input_ids"]), padding)
        embedded = self._of_targets(batch["decoder_input_ids"])
        hidden = self.decoder(embedded, None, sources, padding)
        labels, weights = batch["labels"], label_weights(batch, _TARGET_MASK)
        of_sequences = None
        if self.mlm_loss_scaling == "precomputed_num_masked":
            of_sequences = batch.get(_WEIGHT)
        has_metrics = bool(self.compute_eval_metrics) and not self.training
        score_by = partial(score, self.lm_head, hidden, labels, wants_hits=has_metrics)
        head = HeadSettings(self._logits_scale)
        if self.training:
            head = head._replace(label_smoothing=self.label_smoothing)
        factors = weights if of_sequences is None else weights * of_sequences.float()
        scored = score_by(factors, head, wants_logits=self.wants_logits)
        loss, num_items = self._reduced(scored.total, weights, has_factors=of_sequences is not None)
        outputs: dict[str, Any] = {"loss": loss, "num_items": num_items}
        if scored.logits is not None:
            outputs[LOGITS] = scored.logits
        if has_metrics:
            if of_sequences is not None:  # does not count for the metrics
                with torch.no_grad():
                    scored = score_by(weights, head)
            outputs |= _metrics(scored, weights)
        return outputs

    def count_labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return how many labels of a batch count; see `zoo/models/language_loss.py`."""
        return num_counted(batch.get("labels"), batch.get(_TARGET_MASK))

    def validation_means(
        self, outputs: Mapping[str, Any], batch: Mapping[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor | int, Callable[[Tensor], Tensor] | None]]:
        """Return the metrics that `ModelEvalMetrics` averages over labels, with their weights."""
        if "lm_loss" not in outputs:
            return {}
        num_labels, loss = label_weights(batch, _TARGET_MASK).sum(), outputs["lm_loss"]
        return {
            "accuracy_lm": (outputs["accuracy_lm"], num_labels, None),
            "lm_loss": (loss, num_labels, None),
            "perplexity_lm": (loss, num_labels, torch.exp),
        }

    def _reduced(
        self, total: Tensor, weights: Tensor, *, has_factors: bool
    ) -> tuple[Tensor, Tensor | int]:
        num = weights.shape[0]
        if self.mlm_loss_scaling == "num_masked":
            num_labels = weights.sum()
            return total / num_labels.clamp(min=1), num_labels
        return total / num if has_factors else total * (self.lm_loss_weight / num), num

    def _check_batch(self, batch: Mapping[str, Tensor]) -> None:
        if lacks := [key for key in _NEEDED if key not in batch]:
            raise ConfigError(
                f"The model got a batch with the keys {sorted(batch)}, without {lacks}. Use a data "
                f"processor of encoder-decoder models, such as T5DynamicDataProcessor."
            )
        for stack, key, argument in (
            (self.encoder, "input_ids", "src_max_position_embeddings"),
            (self.decoder, "decoder_input_ids", "tgt_max_position_embeddings"),
        ):
            length = batch[key].shape[1]
            if stack.longest is not None and length > stack.longest:
                raise ConfigError(
                    f"{argument} is {stack.longest}, but {key} has {length} tokens. Increase it, "
                    f"or decrease {argument[:3]}_max_sequence_length of the data."
                )
        like = {"decoder_input_ids": "labels", _TARGET_MASK: "labels", _SOURCE_MASK: "input_ids"}
        for key, other in like.items():
            if key in batch and batch[key].shape != batch[other].shape:
                raise ConfigError(
                    f"The batch has {key} of the shape {tuple(batch[key].shape)}, but {other} of "
                    f"the shape {tuple(batch[other].shape)}: both must be equal."
                )
        num, num_labeled = len(batch["input_ids"]), len(batch["labels"])
        if num != num_labeled:
            raise ConfigError(
                f"The batch has {num} sequences in input_ids, but {num_labeled} in labels: both "
                f"must be equal."
            )
        if not torch.compiler.is_compiling():
            self._say_which_weight(has_weight=_WEIGHT in batch)

    def _say_which_weight(self, *, has_weight: bool) -> None:
        """Log once if the data and the scaling of the loss do not fit."""
        uses_weight = self.mlm_loss_scaling == "precomputed_num_masked"
        is_unused = has_weight and uses_weight and self.lm_loss_weight != 1
        if self._has_said or (has_weight == uses_weight and not is_unused):
            return
        self._has_said = True
        if is_unused:
            log.info(
                "lm_loss_weight (%s) has no effect: mlm_loss_scaling: precomputed_num_masked uses "
                "loss_weight of the batch (dynamic_loss_weight) instead.",
                self.lm_loss_weight,
            )
        elif has_weight:
            log.info(
                "loss_weight of the batch (dynamic_loss_weight) has no effect with "
                "mlm_loss_scaling: %s; precomputed_num_masked uses it.",
                self.mlm_loss_scaling,
            )
        else:
            log.info(
                "mlm_loss_scaling: precomputed_num_masked acts as batch_size with lm_loss_weight "
                "%s, as the batch has no loss_weight. Set dynamic_loss_weight: true in the data "
                "processor to have it.",
                self.lm_loss_weight,
            )


def _metrics(scored: Scored, weights: Tensor) -> dict[str, Tensor]:
    counted = weights.sum().clamp(min=1)
    assert scored.hits is not None
    return {
        "accuracy_lm": (scored.hits * weights).sum() / counted,
        "lm_loss": (scored.losses * weights).sum() / counted,
    }
