"""Classes of sequences: a linear layer on the pooled state of BERT's encoder.

Dimension letters: B batch, T positions, K labels.
"""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from modelzoo_trainer.base.constraints import Fraction, Size, checked_dataclass
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.heads import EncoderWithHead, check_keys
from modelzoo_trainer.zoo.models.bert.settings import EncoderSettings
from modelzoo_trainer.zoo.models.language_loss import (
    mean_loss,
    num_counted,
    sum_of_weights,
    token_accuracy,
)

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
_SUBSETS: Final = {"is_matched": "accuracy_matched", "is_mismatched": "accuracy_mismatched"}

Means = dict[str, tuple[Tensor, Tensor | int, Callable[[Tensor], Tensor] | None]]


@checked_dataclass(kw_only=True)
class ClassifierSettings(EncoderSettings):
    """Settings of a classifier of sequences.

    Args:
        num_labels: Number of classes, or of numbers to predict.
        problem_type: `single_label_classification`: one class of each sequence;
            `multi_label_classification`: any of them; `regression`: numbers.
        task_dropout: Dropout of the pooled state.
        vocab_size: Vocabulary size.
        attention_dropout_rate: Dropout of attention weights; null = `dropout_rate`.
    """

    num_labels: Size = field()  # required
    problem_type: ProblemType = field()
    task_dropout: Fraction = field()
    vocab_size: Size = 30522
    attention_dropout_rate: Fraction | None = 0.1

    @property
    @override
    def has_pooler(self) -> bool:
        return True


class BertClassifier(ClassifierSettings, EncoderWithHead):
    """BERT with a head for classes of sequences, or for numbers."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.build(self.num_labels, self.task_dropout, has_bias=True)

    @classmethod
    @override
    def _settings_class(cls) -> type[EncoderSettings]:
        return ClassifierSettings

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the loss and the logits.

        The loss is a mean: of cross entropies, of binary ones, or of squared differences. A single
        label of -100 does not count.

        Args:
            batch: What the encoder needs, and `labels`.

        Returns:
            `loss`, `logits`; of single labels also `num_items`, in eval mode `accuracy`.
            `ModelEvalMetrics` also logs `accuracy_matched` and `accuracy_mismatched`, of the rows
            whose `is_matched` or `is_mismatched` in the batch is 1, and with two labels `f1_score`,
            whose average over both classes (micro) equals the accuracy.

        Shapes:
            labels: (B,) or (B, 1) integer; (B, K) of several labels; (B,) or (B, K) of numbers.
            logits: (B, K). loss, num_items, accuracy: (), float32.

        Cost:
            No host read, no data-dependent shape.

        Raises:
            ConfigError: If the batch does not fit the model.
        """
        check_keys(batch, ("input_ids", "labels"), "MNLIDataProcessor or SST2DataProcessor")
        pooled = self.encoder.pool(self.encoder(batch))
        logits = self.classifier(self.dropout(pooled))
        loss, num_items = self._loss(logits.float(), batch["labels"])
        outputs: dict[str, Any] = {"loss": loss, "logits": logits}
        if num_items is not None:
            outputs["num_items"] = num_items
        if self._is_measured:
            outputs["accuracy"] = token_accuracy(logits, batch["labels"].flatten(), None)
        return outputs

    def count_labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return how many labels of a batch count; see `zoo/models/language_loss.py`."""
        return num_counted(batch.get("labels")) if self._has_one_label else None

    def validation_means(self, outputs: Mapping[str, Any], batch: Mapping[str, Tensor]) -> Means:
        """Return the metrics that `ModelEvalMetrics` averages over rows, with their weights."""
        if "accuracy" not in outputs:
            return {}
        found: Means = {"accuracy": (outputs["accuracy"], outputs["num_items"], None)}
        if self.num_labels == 2:
            found["f1_score"] = found["accuracy"]
        labels = batch["labels"].flatten()
        for key, name in _SUBSETS.items():
            if key in batch:
                weights = batch[key].flatten().float()
                accuracy = token_accuracy(outputs["logits"], labels, weights)
                found[name] = (accuracy, sum_of_weights(labels, weights), None)
        return found

    @property
    def _has_one_label(self) -> bool:
        return self.problem_type == "single_label_classification"

    @property
    def _is_measured(self) -> bool:
        return self.compute_eval_metrics and not self.training and self._has_one_label

    def _loss(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the loss and, if labels may not count, the number of those that do."""
        if self._has_one_label:
            self._check_size(labels, logits.shape[0])
            return mean_loss(logits, labels.flatten())
        self._check_size(labels, logits.numel())
        targets = labels.reshape(logits.shape).to(torch.float32)
        if self.problem_type == "regression":
            return functional.mse_loss(logits, targets), None
        return functional.binary_cross_entropy_with_logits(logits, targets), None

    def _check_size(self, labels: Tensor, expected: int) -> None:
        if labels.numel() != expected:
            raise ConfigError(
                f"The batch has labels of the shape {tuple(labels.shape)}, but {expected} labels "
                f"are expected (problem_type {self.problem_type}, num_labels {self.num_labels}). "
                f"Set those that fit the data."
            )
