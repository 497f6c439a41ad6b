"""BERT's pretraining: masked tokens, and whether a sentence follows another one.

https://arxiv.org/abs/1810.04805

Dimension letters: B batch, T positions, P predicted positions, V vocabulary, H hidden size.
"""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from modelzoo_trainer.base.constraints import (
    FiniteFloat,
    Fraction,
    NonNegativeSize,
    Size,
    checked_dataclass,
)
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.encoder import Encoder, Step, draw_weight
from modelzoo_trainer.zoo.models.bert.engines import encoder_tensor_plan, lr_groups, published_name
from modelzoo_trainer.zoo.models.bert.settings import EncoderSettings
from modelzoo_trainer.zoo.models.feed_forward import Nonlinearity, activation_of
from modelzoo_trainer.zoo.models.language_loss import (
    label_weights,
    num_counted,
    sum_of_weights,
    token_losses,
)
from modelzoo_trainer.zoo.models.parametrization import LrAdjustmentGroup, logits_scale
from modelzoo_trainer.zoo.rows.hdf5_format import IGNORED_LABEL

POSITIONS = "masked_lm_positions"
_WEIGHTS = "masked_lm_mask"
_SCALE = "mlm_loss_scale"
_NEXT = "next_sentence_label"


@checked_dataclass(kw_only=True)
class BertSettings(EncoderSettings):
    """Settings of BERT's pretraining.

    Args:
        disable_nsp: Whether only masked tokens are predicted, not the next sentence; then the model
            has no pooler, and by default no segments.
        num_segments: Number of segments (`token_type_ids`), 0 = none; null = 2, or 0 with
            `disable_nsp`.
        num_classes: Number of classes of the next sentence.
        pad_token_id: Token whose embedding is not trained by its use as an input.
        mlm_nonlinearity: Activation of the head for masked tokens; null = `encoder_nonlinearity`.
        use_ffn_bias_in_mlm: Whether the first layer of that head has a bias.
        use_output_bias_in_mlm: Whether its output layer has one.
        share_embedding_weights: Whether its output layer shares the weights of the embedding.
        mlm_loss_weight: Factor on the loss of masked tokens, which is a sum per sequence.
        label_smoothing: Share of the labels that is spread over the vocabulary, in training.
    """

    disable_nsp: bool = False
    num_segments: NonNegativeSize | None = None
    num_classes: Size = 2
    pad_token_id: NonNegativeSize = 0
    mlm_nonlinearity: Nonlinearity | None = None
    use_ffn_bias_in_mlm: bool = True
    use_output_bias_in_mlm: bool = True
    share_embedding_weights: bool = True
    mlm_loss_weight: FiniteFloat = 1.0
    label_smoothing: Fraction = 0.0

    @property
    @override
    def segments(self) -> int:
        if self.num_segments is None:
            return 0 if self.disable_nsp else 2
        return self.num_segments

    @property
    @override
    def has_pooler(self) -> bool:
        return not self.disable_nsp


class Bert(BertSettings, nn.Module):
    """BERT with the heads of its pretraining; RoBERTa with `disable_nsp`."""

    builds_without_values = True
    """Whether `reset_steps` draws all initial values, so that the constructor need not."""

    published_name = staticmethod(published_name)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        nn.Module.__init__(self)
        self.warn_of_unused(stacklevel=3)
        size = self.hidden_size
        self.encoder = Encoder(self)
        self.mlm_dense = nn.Linear(size, size, bias=self.use_ffn_bias_in_mlm)
        self.mlm_norm = nn.LayerNorm(size, eps=self.layer_norm_epsilon)
        self.lm_head = nn.Linear(size, self.vocab_size, bias=self.use_output_bias_in_mlm)
        self.nsp_head: nn.Linear | None = None
        if not self.disable_nsp:
            self.nsp_head = nn.Linear(size, self.num_classes, bias=self.use_ffn_bias)
        self._activate = activation_of(self.mlm_nonlinearity or self.encoder_nonlinearity)
        self._logits_scale = logits_scale(self)
        self.reset_parameters()

    @classmethod
    @override
    def _settings_class(cls) -> type[EncoderSettings]:
        return BertSettings

    @property
    def lr_adjustment_groups(self) -> Mapping[str, LrAdjustmentGroup]:
        """Groups of parameters with learning rate factors, by name; all 1 without muP."""
        return lr_groups(self)

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Tensor parallelism: how layers are split, by module name patterns.

        As in the decoders; the pooler and the first layer of the head are whole everywhere.
        """
        return encoder_tensor_plan(self.encoder) | {"lm_head": "colwise_gather"}

    def reset_parameters(self) -> None:
        """Initialize all weights and tie shared ones; also after `to_empty`."""
        if self.share_embedding_weights:
            self.lm_head.weight = self.encoder.token_embeddings.weight
        for _, draw in self.reset_steps():
            draw()

    def reset_steps(self) -> Iterator[Step]:
        """Yield the parts of the model, each with the function that initializes it."""
        yield from self.encoder.initial_steps()
        default = self.initializers()["default"]
        yield self.mlm_dense, partial(draw_weight, self.mlm_dense, default)
        yield self.mlm_norm, self.mlm_norm.reset_parameters
        if self.nsp_head is not None:
            yield self.nsp_head, partial(draw_weight, self.nsp_head, default)
        yield self.lm_head, partial(self._draw_lm_head, default)

    def _draw_lm_head(self, initializer: Any) -> None:
        if not self.share_embedding_weights:
            initializer(self.lm_head.weight)
        if self.lm_head.bias is not None:
            nn.init.zeros_(self.lm_head.bias)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the loss, the logits and the number of sequences.

        loss = mlm_loss_weight * sum(w * cross entropy) / B + mean cross entropy of the next
        sentence, with w = `masked_lm_mask`, 0 where the label is -100. With `mlm_loss_scale` in the
        batch, that factor is in place of `mlm_loss_weight`.

        Args:
            batch: What the encoder needs, and `labels`. With `masked_lm_positions`, these are the
                labels of those positions, otherwise of all positions. `masked_lm_mask`: the
                weight of each label; missing = 1. `mlm_loss_scale`: a factor. Unless `disable_nsp`
                is set: `next_sentence_label`, (B, 1) or (B,). Rows whose `attention_mask` is all 0
                are padding and no part of B; their labels must be -100, or have no weight.

        Returns:
            `loss`, `logits`, `num_items` and, unless `disable_nsp` is set, `nsp_logits`; in eval
            mode also `accuracy_masked_lm` and `mlm_loss` (the mean cross entropy of labels that
            count), from which `ModelEvalMetrics` also logs `mlm_perplexity`, and `accuracy_cls`.

        Shapes:
            labels, masked_lm_positions, masked_lm_mask: (B, P), or (B, T) without positions.
            mlm_loss_scale: (B, 1). logits: (B, P or T, V). nsp_logits: (B, `num_classes`).
            loss and metrics: (), float32. num_items: B, an int; with `attention_mask` () float32.

        Cost:
            No host read, no data-dependent shape.
        """
        self._check_batch(batch)
        hidden = self.encoder(batch)
        labels, weights = batch["labels"], label_weights(batch, _WEIGHTS)
        logits = self._score(hidden, batch.get(POSITIONS))
        smoothing = self.label_smoothing if self.training else 0.0
        losses = token_losses(logits, labels, label_smoothing=smoothing)
        num = num_sequences(batch)
        if _SCALE in batch:
            scaled = losses * weights * batch[_SCALE].float()
            loss = scaled.sum() / num
        else:
            loss = (losses * weights).sum() * self.mlm_loss_weight / num
        outputs: dict[str, Any] = {"logits": logits, "num_items": num}
        is_measured = self.compute_eval_metrics and not self.training
        if self.nsp_head is not None:
            classes = self._scaled(self.nsp_head(self.encoder.pool(hidden)))
            targets = batch[_NEXT].flatten().long()
            sums = functional.cross_entropy(classes.float(), targets, reduction="sum")
            num_targets = (targets != IGNORED_LABEL).sum().clamp(min=1)
            loss = loss + sums / num_targets
            outputs["nsp_logits"] = classes
            if is_measured:
                outputs["accuracy_cls"] = (classes.argmax(dim=-1) == targets).sum() / num_targets
        if is_measured:
            counted = weights.sum().clamp(min=1)
            hits = (logits.argmax(dim=-1) == labels) * weights
            outputs["accuracy_masked_lm"] = hits.sum() / counted
            outputs["mlm_loss"] = (losses.detach() * weights).sum() / counted
        return {"loss": loss, **outputs}

    def count_labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return how many labels of a batch count; see `zoo/models/language_loss.py`."""
        num = num_counted(batch.get("labels"), batch.get(_WEIGHTS))
        if num is None or self.nsp_head is None:
            return num
        num_targets = num_counted(batch.get(_NEXT))
        return None if num_targets is None else num + num_targets

    def validation_means(
        self, outputs: Mapping[str, Any], batch: Mapping[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor | int, Callable[[Tensor], Tensor] | None]]:
        """Return the metrics that `ModelEvalMetrics` averages over labels, with their weights."""
        if "mlm_loss" not in outputs:
            return {}
        num_labels = label_weights(batch, _WEIGHTS).sum()
        loss = outputs["mlm_loss"]
        found: dict[str, tuple[Tensor, Tensor | int, Callable[[Tensor], Tensor] | None]] = {
            "accuracy_masked_lm": (outputs["accuracy_masked_lm"], num_labels, None),
            "mlm_loss": (loss, num_labels, None),
            "mlm_perplexity": (loss, num_labels, torch.exp),
        }
        if self.nsp_head is not None:
            num_targets = sum_of_weights(batch[_NEXT], None)
            found["accuracy_cls"] = (outputs["accuracy_cls"], num_targets, None)
        return found

    def _score(self, hidden: Tensor, positions: Tensor | None) -> Tensor:
        if positions is not None:
            index = positions.long()[..., None].expand(-1, -1, hidden.shape[-1])
            hidden = hidden.gather(1, index)
        hidden = self.mlm_norm(self._activate(self.mlm_dense(hidden)))
        return self._scaled(self.lm_head(hidden))

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits if self._logits_scale == 1 else logits * self._logits_scale

    def _check_batch(self, batch: Mapping[str, Tensor]) -> None:
        needed = {"input_ids", "labels"} | (set() if self.disable_nsp else {_NEXT})
        if lacks := needed - batch.keys():
            raise ConfigError(
                f"The model got a batch with the keys {sorted(batch)}, without {sorted(lacks)}. "
                f"Use a data processor of BERT with the same disable_nsp as the model "
                f"({str(self.disable_nsp).lower()})."
            )
        shape = tuple(batch["labels"].shape)
        expected = tuple(batch.get(POSITIONS, batch["input_ids"]).shape)
        weights = tuple(batch[_WEIGHTS].shape) if _WEIGHTS in batch else shape
        if shape != expected or weights != shape:
            raise ConfigError(
                f"The batch has labels of the shape {shape} and {_WEIGHTS} of the shape {weights}, "
                f"but both require the shape of "
                f"{POSITIONS if POSITIONS in batch else 'input_ids'}, {expected}. "
                f"Labels of some positions only require {POSITIONS}."
            )


def num_sequences(batch: Mapping[str, Tensor]) -> Tensor | int:
    """Return the number of sequences without padding rows, at least 1.

    Shapes:
        Returns: () float32, or an int without `attention_mask`.
    """
    mask = batch.get("attention_mask")
    if mask is None:
        return batch["input_ids"].shape[0]
    return (mask != 0).any(dim=-1).sum(dtype=torch.float32).clamp(min=1)
