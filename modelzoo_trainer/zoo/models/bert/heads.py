"""What the models have in common that put one linear layer onto BERT's encoder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

from torch import Tensor, nn
from typing_extensions import override

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.encoder import Encoder, Step, draw_weight
from modelzoo_trainer.zoo.models.bert.engines import encoder_tensor_plan, lr_groups
from modelzoo_trainer.zoo.models.bert.engines import published_name as name_in_pretraining
from modelzoo_trainer.zoo.models.bert.settings import EncoderSettings
from modelzoo_trainer.zoo.models.initializers import normal
from modelzoo_trainer.zoo.models.language_loss import token_losses
from modelzoo_trainer.zoo.models.parametrization import LrAdjustmentGroup
from modelzoo_trainer.zoo.rows.hdf5_format import IGNORED_LABEL

_STD: Final = 0.02  # of the initial weights of the classifier


def published_name(name: str) -> str | None:
    """Return the name of a parameter in the Cerebras Model Zoo, None if it has none.

    `name`: as of `named_parameters()`.
    """
    if name.startswith("classifier."):
        return f"model.{name}"
    found = name_in_pretraining(name)
    return None if found is None else re.sub(r"^model\.bert_encoder\.", "model.bert.", found)


class EncoderWithHead(EncoderSettings, nn.Module):
    """Base class: an encoder, dropout, and a linear layer called `classifier`.

    Constructors of subclasses call `build`.
    """

    builds_without_values = True
    """Whether `reset_steps` draws all initial values, so that the constructor need not."""

    published_name = staticmethod(published_name)

    def build(self, num_classes: int, dropout: float, *, has_bias: bool) -> None:
        """Create the modules.

        Args:
            num_classes: Outputs of the classifier.
            dropout: Rate of the dropout before it.
            has_bias: Whether the classifier has a bias.
        """
        nn.Module.__init__(self)
        self.warn_of_unused(stacklevel=4)
        self.encoder = Encoder(self)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(self.hidden_size, num_classes, bias=has_bias)
        self.reset_parameters()

    @override
    def unused(self) -> dict[str, str]:
        reason = ": the logits of this head are not scaled. Remove it."
        of_logits = {key: reason for key, is_set in self.set_for_logits().items() if is_set}
        return super().unused() | of_logits

    @property
    def lr_adjustment_groups(self) -> Mapping[str, LrAdjustmentGroup]:
        """Groups of parameters with learning rate factors, by name; all 1 without muP."""
        return lr_groups(self)

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Tensor parallelism: how layers are split, by module name patterns.

        The pooler and the classifier are whole everywhere.
        """
        return encoder_tensor_plan(self.encoder)

    def reset_parameters(self) -> None:
        """Initialize all weights; also after `to_empty`."""
        for _, draw in self.reset_steps():
            draw()

    def reset_steps(self) -> Iterator[Step]:
        """Yield the parts of the model, each with the function that initializes it."""
        yield from self.encoder.initial_steps()
        yield self.classifier, partial(draw_weight, self.classifier, normal(_STD))


def check_keys(batch: Mapping[str, Tensor], needed: tuple[str, ...], processor: str) -> None:
    """Check that a batch has what a model needs.

    Raises:
        ConfigError: If it lacks something.
    """
    if lacks := [key for key in needed if key not in batch]:
        raise ConfigError(
            f"The model got a batch with the keys {sorted(batch)}, without {lacks}. Use a data "
            f"processor such as {processor}."
        )


def weighted_losses(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of weighted cross entropies; labels of -100 and of weight 0 do not count.

    Shapes:
        logits: (B, P, classes). labels, weights: (B, P). Returns: (), float32.
    """
    return (token_losses(logits, labels) * weights.float()).sum()


def weighted_accuracy(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the fraction of labels that have the largest logit, and the sum of the weights.

    Shapes:
        As for `weighted_losses`; returns: twice (), float32.
    """
    counts = (weights * (labels != IGNORED_LABEL)).float()
    num = counts.sum()
    hits = (logits.argmax(dim=-1) == labels) * counts
    return hits.sum() / num.clamp(min=1), num
