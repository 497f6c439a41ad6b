"""A decoder that gets the features of several images in place of tokens anywhere in a row.

Dimension letters: B batch, I images of a row, C channels, T positions, P features of an image, H
hidden size, V vocabulary size.
"""

# Annotations are evaluated here: they are the schema.
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor, nn
from typing_extensions import override

from modelzoo_trainer.base.constraints import FiniteFloat, check, checked
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

_PLACES: Final = "image_data_loc"
_LIST: Final = "image_model_list"
_LAYER_IDX: Final = "image_layer_idx"
_LIST_KEYS: Final = ("image_models", "image_feature_select_mode", "global_image_projection")
_MEMBER_KEYS: Final = ("image_encoder", "projection_layer")
_ENCODER: Final = "image_model.image_model_list.0.encoder."
_LAYER: Final = r"layers\.(\d+)\."
_FFN: Final = r"ffn.\1.linear_layer."
_PROJECTORS: Final = {
    rf"image_model\.image_model_list\.0\.projection\.{_LAYER}": (
        f"image_model.image_model_list.0.1.{_FFN}"
    ),
    rf"image_model\.global_image_projection\.{_LAYER}": (
        f"image_model.global_image_projection.{_FFN}"
    ),
}


class _ImageParts(NamedTuple):
    encoder: VisionSettings
    layer: int | None
    mode: SelectMode
    projection: ProjectorSettings | None
    whole: ProjectorSettings | None  # of all encoders together


class _Tower(nn.Module):
    """An image model and the layers after it."""

    def __init__(self, parts: _ImageParts) -> None:
        super().__init__()
        self.encoder = VisionEncoder(parts.encoder)
        self.projection = nn.Identity() if parts.projection is None else Projector(parts.projection)


class _ImageModel(nn.Module):
    """Features of images, in the width of the decoder."""

    def __init__(self, parts: _ImageParts) -> None:
        super().__init__()
        self._parts = parts
        # No ModuleList: its elements would be blocks for engines, in place of their layers.
        self.image_model_list = nn.ModuleDict({"0": _Tower(parts)})
        self.global_image_projection = (
            nn.Identity() if parts.whole is None else Projector(parts.whole)
        )

    @property
    def tower(self) -> _Tower:
        tower = self.image_model_list["0"]
        assert isinstance(tower, _Tower)
        return tower

    @property
    def num_features(self) -> int:
        """Features of an image."""
        return num_features(self._parts.encoder, self._parts.mode)

    def initial_steps(self) -> Iterator[Step]:
        """Yield the parts, each with the function that initializes it."""
        yield from self.tower.encoder.initial_steps()
        for projector in (self.tower.projection, self.global_image_projection):
            if isinstance(projector, Projector):
                yield from projector.initial_steps()

    def forward(self, images: Tensor) -> Tensor:
        """Return the features.

        Shapes:
            images: (B, C, height, width). Returns: (B, P, H).
        """
        parts, tower = self._parts, self.tower
        features = features_of(tower.encoder, images, parts.layer, parts.mode)
        projected: Tensor = self.global_image_projection(tower.projection(features))
        return projected


class MultimodalSimple(ImageTextModel):
    """A decoder that sees several images in each row, anywhere in the text.

    The states of a layer of the image model, projected, replace what the first layer of the decoder
    gets at the positions that the data names. Features get no position embedding, no scale,
    normalization or dropout of embeddings. Layers of the image model after the selected one, and
    its final norm, do not run and are not trained.

    Args:
        image_model_list: `image_models`, a list of one mapping: `image_encoder` with `name:
            ViTModel`, the settings of `vision_transformer` without its head, and `image_layer_idx`,
            the layer whose states are the features (default -1, null = those after the last one and
            the final norm); `projection_layer`, see the next one. `global_image_projection`:
            `name: FeedForwardNetwork` and its settings. `image_feature_select_mode`: `patch` or
            `cls_patch`.
        text_model: `name` of a decoder and its settings.
        freeze: Regular expressions; parameters and modules in whose names, or names in the Model
            Zoo (`image_model.image_model_list...`, `text_model...`), one is found are not trained.
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
        image_model_list: dict[str, Any],
        text_model: dict[str, Any],
        freeze: list[str] | None = None,
        loss_scaling: LossScaling = "num_tokens",
        loss_weight: FiniteFloat = 1.0,
    ) -> None:
        super().__init__()
        images, text = _parts(image_model_list, text_model, loss_scaling, loss_weight)
        check_patterns(freeze or ())
        where = f"{_LIST}.image_models[0].image_encoder"
        warn_of_unused(where, image_model_list["image_models"][0]["image_encoder"])
        self.image_model = _ImageModel(images)
        self.text_model = text.build()
        for _, draw in self.reset_steps():
            draw()
        freeze_unused(self.image_model.tower.encoder, images.layer)
        freeze_matching(self, freeze or (), "'^image_model.image_model_list' or '^text_model'")

    @classmethod
    def check_arguments(
        cls,
        *,
        image_model_list: dict[str, Any],
        text_model: dict[str, Any],
        freeze: list[str] | None = None,
        loss_scaling: LossScaling = "num_tokens",
        loss_weight: float = 1.0,
    ) -> None:
        """Check the constructor's arguments without building the model.

        Raises:
            ConfigError: As the constructor, except for expressions in `freeze` without a match.
        """
        _parts(image_model_list, text_model, loss_scaling, loss_weight)
        check_patterns(freeze or ())

    @property
    def num_features_of_image(self) -> int:
        """Number of features, and of positions, of an image."""
        return self.image_model.num_features

    @staticmethod
    def published_name(name: str) -> str | None:
        """Return the name of a parameter in the Cerebras Model Zoo, None if it has none.

        `name`: as of `named_parameters()`. The name of the last projection is ours: the published
        one is not known.
        """
        if name.startswith(_ENCODER):
            inner = name.removeprefix(_ENCODER)
            return published_image_name(inner, "image_model.image_model_list.0.0.")
        if name.startswith("text_model."):
            return published_text_name(name.removeprefix("text_model."))
        return renamed(name, _PROJECTORS)

    @override
    def image_tensor_plan(self) -> dict[str, str]:
        plan = self.image_model.tower.encoder.tensor_plan
        return {f"{_ENCODER}{key}": one for key, one in plan.items()}

    @override
    def reset_steps(self) -> Iterator[Step]:
        yield from self.image_model.initial_steps()

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the loss and the number of items that it is averaged over.

        Args:
            batch: `image_data`, the images of each row; `image_data_loc`, the position of each
                feature, T for one of an image that is not there; `text_input_ids`, with
                placeholders where features are written; `labels`; `loss_mask`, the weight of each
                label. Where there are any: `key_padding_mask`, 1 for positions that no other one
                sees; `attention_span` and `position_ids`, as of the decoders.

        Returns:
            `loss`, `num_items`; `logits` where they are requested; in eval mode also `accuracy`;
            as of the decoders.

        Shapes:
            image_data: (B, I, C, height, width) floating. image_data_loc: (B, I, P) integer. All
            others in batch: (B, T) integer. loss, accuracy: (), float32. logits: (B, T, V).

        Cost:
            No host read, no data-dependent shape.

        Raises:
            ConfigError: If the batch does not fit the model.
        """
        text = text_of(batch)
        images = batch[IMAGES]
        num, length = text["input_ids"].shape
        expected = (*images.shape[:2], self.num_features_of_image)
        if _PLACES not in batch or images.dim() != 5 or images.shape[0] != num:
            has = _PLACES if _PLACES in batch else f"no {_PLACES}"
            raise ConfigError(
                f"The batch has {IMAGES} of the shape {tuple(images.shape)}, {has} and {num} rows "
                f"of text, expected (batch, images, channels, height, width). Use "
                f"MultimodalSimpleHDF5MapDataProcessor."
            )
        if tuple(batch[_PLACES].shape) != expected:
            raise ConfigError(
                f"The batch has {_PLACES} of the shape {tuple(batch[_PLACES].shape)}, expected "
                f"{expected}: a position for each feature of each image. Preprocess the data for "
                f"images of {self.num_features_of_image} patches, or change the image model."
            )
        features = self.image_model(images.flatten(0, 1)).unflatten(0, (num, -1)).flatten(1, 2)
        states = self.text_model.input_states(text["input_ids"], text.get("position_ids"))
        places = batch[_PLACES].flatten(1).long()[..., None].expand_as(features)
        spare = nn.functional.pad(states, (0, 0, 0, 1))  # for images that are not there
        states = spare.scatter(1, places, features.to(states.dtype))[:, :length]
        return self.text_model.outputs_of(text, states=states, padding=padding_of(batch))


def _parts(
    image_model_list: object,
    text_model: Mapping[str, Any],
    loss_scaling: LossScaling,
    loss_weight: float,
) -> tuple[_ImageParts, TextModelPart]:
    """Return the settings of the parts.

    Raises:
        ConfigError: If they are invalid, or do not fit each other.
    """
    text = TextModelPart(text_model, loss_scaling, loss_weight)
    return _image_parts(image_model_list, text.settings.hidden_size), text


def _image_parts(given: object, output_size: int) -> _ImageParts:
    section = _section(_LIST, given, _LIST_KEYS)
    mode: Any = section.get("image_feature_select_mode") or "patch"
    check(f"model.{_LIST}.image_feature_select_mode", mode, SelectMode)
    members = section.get("image_models")
    if not isinstance(members, list) or len(members) != 1:
        raise ConfigError(
            f"model.{_LIST}.image_models: expected a list with one element (several image models "
            f"are not supported), got {_described(members)}. Keep one."
        )
    where = f"{_LIST}.image_models[0]"
    member = _section(where, members[0], _MEMBER_KEYS)
    own = f"{where}.image_encoder"
    encoder = read_image_model(own, member.get("image_encoder"), mode, others=(_LAYER_IDX,))
    layer = member["image_encoder"].get(_LAYER_IDX, -1)
    check(f"model.{own}.{_LAYER_IDX}", layer, int | None)
    check_layer(f"model.{own}.{_LAYER_IDX}", layer, encoder)
    # The last layers there are bring the features to the width of the decoder.
    last, size = section.get("global_image_projection"), encoder.hidden_size
    first = member.get("projection_layer")
    middle = size
    if first is not None:
        middle = _last_width(first) if last is not None else output_size
    projection = whole = None
    if first is not None:
        projection = read_projector(f"{where}.projection_layer", first, size, middle)
    if last is not None or first is None:
        whole = read_projector(f"{_LIST}.global_image_projection", last, middle, output_size)
    return _ImageParts(encoder, layer, mode, projection, whole)


def _last_width(given: object) -> int:
    """Return the width of the last of some layers, 0 if there is none: it is refused later."""
    units = given.get("layers_units") if isinstance(given, Mapping) else None
    last = units[-1] if isinstance(units, list) and units else 0
    return last if isinstance(last, int) else 0


def _section(where: str, given: object, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"model.{where}: expected a mapping of settings, got {given!r}.")
    for key in given:
        if key not in known:
            raise ConfigError(f"model.{where}.{key}: no such setting. {suggest(str(key), known)}")
    return given


def _described(members: object) -> str:
    return f"{len(members)} elements" if isinstance(members, list) else repr(members)
