"""LLaVA: a decoder that gets the features of an image in place of some tokens.

https://arxiv.org/abs/2310.03744

Dimension letters: B batch, C channels, T positions, P features of an image, V vocabulary size.
"""

# Annotations are evaluated here: they are the schema.
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from modelzoo_trainer.base.constraints import FiniteFloat, NonNegativeSize, checked
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.models.bert.encoder import Step
from modelzoo_trainer.zoo.models.freezing import check_patterns, freeze_matching
from modelzoo_trainer.zoo.models.language_loss import LossScaling
from modelzoo_trainer.zoo.models.multimodal.image_model import (
    SelectMode,
    check_layer,
    features_of,
    freeze_unused,
    num_features,
    published_image_name,
    read_image_model,
    warn_of_unused,
)
from modelzoo_trainer.zoo.models.multimodal.projector import (
    Projector,
    ProjectorSettings,
    read_projector,
)
from modelzoo_trainer.zoo.models.multimodal.text_model import (
    IMAGES,
    ImageTextModel,
    TextModelPart,
    padding_of,
    published_text_name,
    text_of,
)
from modelzoo_trainer.zoo.models.published_names import renamed
from modelzoo_trainer.zoo.models.vision.encoder import VisionEncoder
from modelzoo_trainer.zoo.models.vision.settings import VisionSettings

_STARTS = "img_start_idx"
_LAYER_IDX = "image_feature_select_layer_idx"
_REFUSED = {"image_layer_idx": f"{_LAYER_IDX} of the model selects the layer. Set that instead."}
_PROJECTOR = {r"projector\.layers\.(\d+)\.": r"projector_image_model.ffn.\1.linear_layer."}


class _Parts(NamedTuple):
    image: VisionSettings
    projector: ProjectorSettings | None
    text: TextModelPart


class Llava(ImageTextModel):
    """A decoder that sees one image per row: the model of LLaVA.

    The states of a layer of the image model, projected, replace what the first layer of the decoder
    gets at some positions: `image_start_idx` and those after it. The tokens there are placeholders.
    Features get no position embedding, no scale, normalization or dropout of embeddings. Layers of
    the image model after the selected one, and its final norm, do not run and are not trained.

    Args:
        image_model: `name: ViTModel` and the settings of `vision_transformer` without its head.
        text_model: `name` of a decoder and its settings.
        projector: `image_model`: `name: FeedForwardNetwork` and its settings, see the
            documentation; null = features are used as they are.
        image_start_idx: Position of the first feature, from 0, unless a batch has its own.
        image_feature_select_layer_idx: Layer whose states are the features, from 0; negative ones
            count from the end. Null = the states after the last one and the final norm.
        image_feature_select_mode: `patch`: states of the patches; `cls_patch`: also the state of
            the class token, before them.
        freeze: Regular expressions; parameters and modules in whose names, or names in the Model
            Zoo (`image_model...`, `projector_image_model...`, `text_model...`), one is found are
            not trained.
        loss_scaling: `num_tokens` = mean over counted tokens; `batch_size` = sum divided by the
            number of rows.
        loss_weight: Factor on the loss with `loss_scaling: batch_size`.

    Raises:
        ConfigError: If a setting is invalid, or the parts do not fit each other.
    """

    @checked()
    def __init__(
        self,
        *,
        image_model: dict[str, Any],
        text_model: dict[str, Any],
        projector: dict[str, Any] | None = None,
        image_start_idx: NonNegativeSize = 1,
        image_feature_select_layer_idx: int | None = -1,
        image_feature_select_mode: SelectMode = "patch",
        freeze: list[str] | None = None,
        loss_scaling: LossScaling = "num_tokens",
        loss_weight: FiniteFloat = 1.0,
    ) -> None:
        super().__init__()
        self.mode: SelectMode = image_feature_select_mode
        self.layer = image_feature_select_layer_idx
        self.image_start_idx = image_start_idx
        image, layers, text = _parts(
            image_model,
            text_model,
            projector,
            start=image_start_idx,
            layer=self.layer,
            mode=self.mode,
            loss=(loss_scaling, loss_weight),
        )
        check_patterns(freeze or ())
        warn_of_unused("image_model", image_model)
        self.image_model = VisionEncoder(image)
        self.projector = nn.Identity() if layers is None else Projector(layers)
        self.text_model = text.build()
        for _, draw in self.reset_steps():
            draw()
        freeze_unused(self.image_model, self.layer)
        freeze_matching(self, freeze or (), "'^image_model', '^projector' or '^text_model'")

    @classmethod
    def check_arguments(
        cls,
        *,
        image_model: dict[str, Any],
        text_model: dict[str, Any],
        projector: dict[str, Any] | None = None,
        image_start_idx: int = 1,
        image_feature_select_layer_idx: int | None = -1,
        image_feature_select_mode: SelectMode = "patch",
        freeze: list[str] | None = None,
        loss_scaling: LossScaling = "num_tokens",
        loss_weight: float = 1.0,
    ) -> None:
        """Check the constructor's arguments without building the model.

        Raises:
            ConfigError: As the constructor, except for expressions in `freeze` without a match.
        """
        _parts(
            image_model,
            text_model,
            projector,
            start=image_start_idx,
            layer=image_feature_select_layer_idx,
            mode=image_feature_select_mode,
            loss=(loss_scaling, loss_weight),
        )
        check_patterns(freeze or ())

    @property
    def image_positions(self) -> tuple[int, int]:
        """The first position of features, and the one after the last."""
        num = num_features(self.image_model.settings, self.mode)
        return self.image_start_idx, self.image_start_idx + num

    @staticmethod
    def published_name(name: str) -> str | None:
        """Return the name of a parameter in the Cerebras Model Zoo, None if it has none.

        `name`: as of `named_parameters()`.
        """
        part, _, inner = name.partition(".")
        if part == "image_model":
            return published_image_name(inner, "image_model.")
        if part == "text_model":
            return published_text_name(inner)
        return renamed(name, _PROJECTOR)

    @override
    def image_tensor_plan(self) -> dict[str, str]:
        return {f"image_model.{key}": one for key, one in self.image_model.tensor_plan.items()}

    @override
    def reset_steps(self) -> Iterator[Step]:
        yield from self.image_model.initial_steps()
        if isinstance(self.projector, Projector):
            yield from self.projector.initial_steps()

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the loss and the number of items that it is averaged over.

        Args:
            batch: `image_data`, an image for each row; `text_input_ids`, with placeholders where
                features are written; `labels`; `loss_mask`, the weight of each label. Where there
                are any: `key_padding_mask`, 1 for positions that no other one sees;
                `img_start_idx`, the position of the first feature of each row, which must have room
                for all (not checked, as that needs a host read); `attention_span` and
                `position_ids`, as of the decoders.

        Returns:
            `loss`, `num_items`; `logits` where they are requested; in eval mode also `accuracy`;
            as of the decoders.

        Shapes:
            image_data: (B, C, height, width) floating. img_start_idx: (B,) or (B, 1) integer. All
            others in batch: (B, T) integer. loss, accuracy: (), float32. logits: (B, T, V).

        Cost:
            No host read, no data-dependent shape.

        Raises:
            ConfigError: If the batch does not fit the model.
        """
        text = text_of(batch)
        images, starts = batch[IMAGES], batch.get(_STARTS)
        num, length = text["input_ids"].shape
        first, end = self.image_positions
        if images.dim() != 4 or images.shape[0] != num:
            raise ConfigError(
                f"The batch has {IMAGES} of the shape {tuple(images.shape)}, but {num} rows of "
                f"text: there must be one image for each, (batch, channels, height, width)."
            )
        if starts is None and end > length:
            raise ConfigError(
                f"image_start_idx is {first}, and an image has {end - first} features, but rows "
                f"have only {length} positions. Decrease it, or use longer rows."
            )
        features = self.projector(features_of(self.image_model, images, self.layer, self.mode))
        states = self.text_model.input_states(text["input_ids"], text.get("position_ids"))
        features = features.to(states.dtype)
        if starts is None:
            states = torch.cat((states[:, :first], features, states[:, end:]), dim=1)
        else:
            states = _written_at(states, features, starts)
        return self.text_model.outputs_of(text, states=states, padding=padding_of(batch))


def _written_at(states: Tensor, features: Tensor, starts: Tensor) -> Tensor:
    """Write features over states, from the position on that each row has.

    Shapes:
        states: (B, T, H). features: (B, P, H). starts: (B,) or (B, 1). Returns: (B, T, H).
    """
    num, length = features.shape[:2]
    if starts.numel() != num or length > states.shape[1]:
        raise ConfigError(
            f"The batch has {_STARTS} of the shape {tuple(starts.shape)}, {num} images of {length} "
            f"features and rows of {states.shape[1]} positions: it must have one position for each "
            f"row, and features must fit in a row."
        )
    places = starts.reshape(-1, 1).long() + torch.arange(length, device=states.device)
    return states.scatter(1, places[..., None].expand_as(features), features)


def _parts(
    image_model: Mapping[str, Any],
    text_model: Mapping[str, Any],
    projector: Mapping[str, Any] | None,
    *,
    start: int,
    layer: int | None,
    mode: SelectMode,
    loss: tuple[LossScaling, float],
) -> _Parts:
    """Return the settings of the parts.

    Raises:
        ConfigError: If they are invalid, or do not fit each other.
    """
    image = read_image_model("image_model", image_model, mode, refused=_REFUSED)
    check_layer(f"model.{_LAYER_IDX}", layer, image)
    text = TextModelPart(text_model, *loss)
    for key, value in (projector or {}).items():
        if key == "text_model" and value is not None:
            raise ConfigError(
                "model.projector.text_model is set, but layers after the embeddings of tokens are "
                "not supported. Remove it."
            )
        if key not in ("image_model", "text_model"):
            raise ConfigError(
                f"model.projector.{key}: no such setting. {suggest(str(key), ('image_model',))}"
            )
    layers = read_projector(
        "projector.image_model",
        (projector or {}).get("image_model"),
        image.hidden_size,
        text.settings.hidden_size,
    )
    end = start + num_features(image, mode)
    if end > text.settings.max_position_embeddings:
        raise ConfigError(
            f"model.image_start_idx is {start}, and an image has {end - start} features, but the "
            f"text model's max_position_embeddings is {text.settings.max_position_embeddings}. "
            f"Decrease image_start_idx, or increase max_position_embeddings."
        )
    return _Parts(image, layers, text)
