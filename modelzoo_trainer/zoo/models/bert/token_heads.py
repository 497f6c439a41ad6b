"""Classes of tokens, and of the sentences of a document: a linear layer on BERT's states.

Dimension letters: B batch, T positions, C sentences.
"""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.base.constraints import FiniteFloat, Flag, Fraction, Size, checked_dataclass
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.heads import (
    EncoderWithHead,
    check_keys,
    weighted_accuracy,
    weighted_losses,
)
from modelzoo_trainer.zoo.models.bert.settings import EncoderSettings
from modelzoo_trainer.zoo.models.language_loss import num_counted

Means = dict[str, tuple[Tensor, Tensor | int, Callable[[Tensor], Tensor] | None]]


@checked_dataclass(kw_only=True)
class TokenClassifierSettings(EncoderSettings):
    """Settings of a classifier of tokens, such as of named entities.

    Args:
        num_classes: Number of classes.
        encoder_output_dropout_rate: Dropout of the states after the encoder.
        include_padding_in_loss: Whether padding counts in the loss, which is then divided by the
            length of sequences as well; null = no.
        loss_weight: Factor on the loss; null = 1.
        label_vocab_file: JSON file with the number of each label, for the data processor.
        dropout_rate: Dropout after attention, and after both matrices of feed-forward layers; null
            = 0.
        attention_dropout_rate: Dropout of attention weights; null = `dropout_rate`.
    """

    num_classes: Size = field()  # required
    encoder_output_dropout_rate: Fraction = field()
    include_padding_in_loss: Flag | None = None
    loss_weight: FiniteFloat | None = None  # type: ignore[assignment]  # as the format has it
    label_vocab_file: str | None = None
    dropout_rate: Fraction | None = 0.0  # type: ignore[assignment]  # as the format has it
    attention_dropout_rate: Fraction | None = 0.0

    @override
    def __post_init__(self) -> None:
        self.dropout_rate = self.dropout_rate or 0.0
        super().__post_init__()


class BertTokenClassifier(TokenClassifierSettings, EncoderWithHead):
    """BERT with a head for classes of tokens."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        rate = self.encoder_output_dropout_rate
        self.build(self.num_classes, rate, has_bias=True)

    @classmethod
    @override
    def _settings_class(cls) -> type[EncoderSettings]:
        return TokenClassifierSettings

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the loss, the logits and the number of sequences.

        loss = loss_weight * sum(w * cross entropy) / B, with w = `loss_mask`, 0 where the label is
        -100; with `include_padding_in_loss` also divided by T.

        Args:
            batch: What the encoder needs, `labels`, and `loss_mask`; without that, the weights
                come from `attention_mask`, or are 1.

        Returns:
            `loss`, `logits`, `num_items`; in eval mode also `accuracy`, of the tokens that count.

        Shapes:
            labels, loss_mask: (B, T). logits: (B, T, `num_classes`). loss, accuracy: (), float32.
            num_items: B, an int.

        Cost:
            No host read, no data-dependent shape.

        Raises:
            ConfigError: If the batch does not fit the model.
        """
        check_keys(batch, ("input_ids", "labels"), "BertTokenClassifierDataProcessor")
        logits = self.classifier(self.dropout(self.encoder(batch)))
        num, length = batch["labels"].shape
        scale = (1.0 if self.loss_weight is None else self.loss_weight) / num
        if self.include_padding_in_loss:
            scale /= length
        weights = self._weights(batch)
        loss = weighted_losses(logits, batch["labels"], weights) * scale
        outputs = {"loss": loss, "logits": logits, "num_items": num}
        if self.compute_eval_metrics and not self.training:
            outputs["accuracy"] = weighted_accuracy(logits, batch["labels"], weights)[0]
        return outputs

    def validation_means(self, outputs: Mapping[str, Any], batch: Mapping[str, Tensor]) -> Means:
        """Return the metrics that `ModelEvalMetrics` averages over tokens, with their weights."""
        if "accuracy" not in outputs:
            return {}
        found = weighted_accuracy(outputs["logits"], batch["labels"], self._weights(batch))
        return {"accuracy": (*found, None)}

    def count_labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return how many labels of a batch count; see `zoo/models/language_loss.py`."""
        has_labels = isinstance(batch.get("labels"), Tensor)
        return num_counted(batch["labels"], self._weights(batch)) if has_labels else None

    def _weights(self, batch: Mapping[str, Tensor]) -> Tensor:
        for key in ("loss_mask", "attention_mask"):
            if key in batch:
                return batch[key]
        return (batch["labels"] == batch["labels"]).int()


@checked_dataclass(kw_only=True)
class SummarizationSettings(EncoderSettings):
    """Settings of extractive summarization: which sentences of a document are its summary.

    Args:
        num_labels: Number of classes of a sentence.
        use_cls_bias: Whether the head has a bias.
        loss_weight: Factor on the loss; null = 1.
        attention_dropout_rate: Dropout of attention weights.
        compute_eval_metrics: Whether the output has metrics in eval mode.
    """

    num_labels: Size = 2
    use_cls_bias: Flag = True
    loss_weight: FiniteFloat | None = None  # type: ignore[assignment]  # as the format has it
    attention_dropout_rate: Fraction | None = 0.1
    compute_eval_metrics: bool = True


class BertSummarizer(SummarizationSettings, EncoderWithHead):
    """BERT with a head for sentences, at the states of the tokens that begin them.

    https://arxiv.org/abs/1903.10318
    """

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.build(self.num_labels, 0.0, has_bias=self.use_cls_bias)

    @classmethod
    @override
    def _settings_class(cls) -> type[EncoderSettings]:
        return SummarizationSettings

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the loss, the logits and the number of documents.

        loss = loss_weight * sum(cls_weights * cross entropy) / B.

        Args:
            batch: What the encoder needs, `cls_indices`: the positions that begin sentences,
                `cls_weights`: 0 where there is no further sentence, and `labels`.

        Returns:
            `loss`, `logits`, `num_items`; in eval mode also `accuracy`, of the sentences.

        Shapes:
            cls_indices, cls_weights, labels: (B, C). logits: (B, C, `num_labels`). loss, accuracy:
            (), float32. num_items: B, an int.

        Cost:
            No host read, no data-dependent shape.

        Raises:
            ConfigError: If the batch does not fit the model.
        """
        keys = ("input_ids", "labels", "cls_indices", "cls_weights")
        check_keys(batch, keys, "BertSumCSVDataProcessor")
        labels, weights = batch["labels"], batch["cls_weights"]
        if not labels.shape == weights.shape == batch["cls_indices"].shape:
            raise ConfigError(
                f"The batch has labels of the shape {tuple(labels.shape)}, cls_weights of "
                f"{tuple(weights.shape)} and cls_indices of {tuple(batch['cls_indices'].shape)}, "
                f"but all three must be equal."
            )
        hidden = self.encoder(batch)
        index = batch["cls_indices"].long()[..., None].expand(-1, -1, hidden.shape[-1])
        logits = self.classifier(hidden.gather(1, index))
        num: int = labels.shape[0]
        scale = (1.0 if self.loss_weight is None else self.loss_weight) / num
        loss = weighted_losses(logits, labels, weights) * scale
        outputs = {"loss": loss, "logits": logits, "num_items": num}
        if self.compute_eval_metrics and not self.training:
            outputs["accuracy"] = weighted_accuracy(logits, labels, weights)[0]
        return outputs

    def validation_means(self, outputs: Mapping[str, Any], batch: Mapping[str, Tensor]) -> Means:
        """Return the metrics that `ModelEvalMetrics` averages over sentences, with weights."""
        if "accuracy" not in outputs:
            return {}
        found = weighted_accuracy(outputs["logits"], batch["labels"], batch["cls_weights"])
        return {"accuracy": (*found, None)}

    def count_labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return how many labels of a batch count; see `zoo/models/language_loss.py`."""
        return num_counted(batch.get("labels"), batch.get("cls_weights"))
