"""What models with a decoder that sees images have in common: the decoder, and freezing.

Dimension letters: B batch, T positions, P features of an image, V vocabulary size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

from torch import Tensor, nn

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.encoder import Step
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.inner_decoder import decoder_of
from modelzoo_trainer.zoo.models.language_loss import LossScaling, num_counted
from modelzoo_trainer.zoo.models.masks import POSITIONS_KEY, SPAN_KEY
from modelzoo_trainer.zoo.models.multimodal.reading import naming
from modelzoo_trainer.zoo.models.parametrization import LrAdjustmentGroup
from modelzoo_trainer.zoo.models.published_names import published_name

TEXT: Final = "text_input_ids"
IMAGES: Final = "image_data"
_LABELS: Final = "labels"
_LOSS_MASK: Final = "loss_mask"
_PADDING: Final = "key_padding_mask"
_TEXT_MODEL: Final = "text_model"
_EXTRA_FFN: Final = "extra_ffn_params"
_OF_MODEL: Final = ("loss_scaling", "loss_weight")


class TextModelPart:
    """The class of the decoder, its arguments and its settings.

    Args:
        given: `name` of a decoder, and its settings.
        loss_scaling: Of the whole model.
        loss_weight: Likewise.

    Raises:
        ConfigError: If one is invalid.
    """

    def __init__(
        self, given: Mapping[str, Any], loss_scaling: LossScaling, loss_weight: float
    ) -> None:
        self.cls, arguments = decoder_of(_TEXT_MODEL, given)
        for key in _OF_MODEL:
            if arguments.get(key) is not None:
                raise ConfigError(
                    f"model.{_TEXT_MODEL}.{key} is {arguments[key]!r}, but {key} is a setting of "
                    f"the whole model. Move it there."
                )
        extra = arguments.pop(_EXTRA_FFN, None)
        if any((extra or {}).values()):
            raise ConfigError(
                f"model.{_TEXT_MODEL}.{_EXTRA_FFN} is {extra!r}, but feed-forward networks for "
                f"each kind of token are not supported. Remove it."
            )
        self.arguments = arguments | {"loss_scaling": loss_scaling, "loss_weight": loss_weight}
        with naming(_TEXT_MODEL, arguments):
            self.cls.check_arguments(**self.arguments)
            self.settings: DecoderSettings = self.cls.settings_of(**self.arguments)

    def build(self) -> Decoder:
        """Return the decoder."""
        with naming(_TEXT_MODEL, self.arguments):
            return self.cls(**self.arguments)


class ImageTextModel(nn.Module):
    """A decoder that sees images; a class adds what makes features of them."""

    builds_without_values = True
    """Whether `reset_steps` draws all initial values, so that the constructor need not."""

    optional_outputs: ClassVar[tuple[str, ...]] = Decoder.optional_outputs
    """Outputs that are computed on request."""
    model_arguments: ClassVar[tuple[str, ...]] = (_TEXT_MODEL,)
    """Arguments that are settings of a model, which a file has checked line by line."""

    text_model: Decoder

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.text_model.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Largest number of positions in a row, including images."""
        return self.text_model.max_position_embeddings

    @property
    def requested_outputs(self) -> tuple[str, ...] | None:
        """The outputs that are computed on request; see `WithOptionalLogits`."""
        return self.text_model.requested_outputs

    @requested_outputs.setter
    def requested_outputs(self, names: tuple[str, ...] | None) -> None:
        self.text_model.requested_outputs = names

    @property
    def lr_adjustment_groups(self) -> Mapping[str, LrAdjustmentGroup]:
        """Groups of parameters with learning rate factors, as in the decoder."""
        return {
            name: replace(
                group,
                param_filter_patterns=tuple(
                    f"*{_TEXT_MODEL}.{pattern}" for pattern in group.param_filter_patterns
                ),
            )
            for name, group in self.text_model.lr_adjustment_groups.items()
        }

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Tensor parallelism: how layers are split, by module name patterns.

        Projectors are whole everywhere.
        """
        parts = {f"{_TEXT_MODEL}.{key}": one for key, one in self.text_model.tensor_plan.items()}
        return self.image_tensor_plan() | parts

    @property
    def sequence_plan(self) -> dict[str, str]:
        """Sequence parallelism: as in the decoder; image models compute on all positions."""
        return {f"{_TEXT_MODEL}.{key}": one for key, one in self.text_model.sequence_plan.items()}

    def image_tensor_plan(self) -> dict[str, str]:
        """Return the plan of the image models."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialize all weights; also after `to_empty`."""
        self.text_model.reset_parameters()
        for _, draw in self.reset_steps():
            draw()

    def reset_steps(self) -> Iterator[Step]:
        """Yield the parts of the model, each with the function that initializes it.

        The decoder is initialized by its own steps, before these.
        """
        raise NotImplementedError

    def count_labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return how many labels of a batch count; see `zoo/models/language_loss.py`."""
        return num_counted(batch.get(_LABELS), batch.get(_LOSS_MASK))

    def validation_means(
        self, outputs: Mapping[str, Any], batch: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return the metrics that `ModelEvalMetrics` averages over tokens, with their weights."""
        return self.text_model.validation_means(outputs, text_of(batch))


def text_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the text of a batch as a decoder gets it; its mask has the weights of the labels.

    Raises:
        ConfigError: If something is missing, or shapes differ.
    """
    keys = {"input_ids": TEXT, "labels": _LABELS, "attention_mask": _LOSS_MASK}
    lacks = [key for key in (IMAGES, *keys.values()) if key not in batch]
    if lacks:
        raise ConfigError(
            f"The model got a batch with the keys {sorted(batch)}, without {lacks}. Use a data "
            f"processor for images and text, such as LlavaHDF5MapDataProcessor."
        )
    keys |= {key: key for key in (SPAN_KEY, POSITIONS_KEY) if key in batch}
    shapes = {theirs: tuple(batch[theirs].shape) for theirs in keys.values()}
    if _PADDING in batch:
        shapes[_PADDING] = tuple(batch[_PADDING].shape)
    if len(shapes[TEXT]) != 2 or len(set(shapes.values())) > 1:
        raise ConfigError(
            f"The batch has features of the shapes {shapes}, expected one shape for all, (batch, "
            f"tokens)."
        )
    return {ours: batch[theirs] for ours, theirs in keys.items()}


def padding_of(batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return which keys are padding, nonzero for those that are; None = there is none.

    Shapes:
        Returns: (B, T).
    """
    return batch.get(_PADDING)


def published_text_name(name: str) -> str | None:
    """Return the published name of a decoder's parameter in such a model, None if it has none.

    `name`: in the decoder.
    """
    found = published_name(name)
    return None if found is None else found.replace("model.", f"model.{_TEXT_MODEL}.", 1)
