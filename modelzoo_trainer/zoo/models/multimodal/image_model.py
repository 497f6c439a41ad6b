"""The image model of a decoder that sees images: its settings, and its features.

Dimension letters: B images, C channels, T tokens of the image model, P features, H its width.
"""

import warnings
from collections.abc import Mapping
from typing import Any, Final, Literal

from torch import Tensor

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.freezing import freeze_for_good
from modelzoo_trainer.zoo.models.multimodal.reading import check_name, read_settings
from modelzoo_trainer.zoo.models.vision.classifier import published_name
from modelzoo_trainer.zoo.models.vision.encoder import VisionEncoder
from modelzoo_trainer.zoo.models.vision.settings import VisionSettings

SelectMode = Literal["patch", "cls_patch"]

_NAMES: Final = ("ViTModel", "vit", "vision_transformer")
_NO_HEAD: Final = "an image model has no head for classes. Remove it."
_REFUSED: Final = {
    "num_classes": _NO_HEAD,
    "use_bias_in_output": _NO_HEAD,
    "use_dinov2_classifier": _NO_HEAD,
    "compute_eval_metrics": _NO_HEAD,
    "freeze": "the model has freeze for all its parts, such as '^image_model'. Move it there.",
    "interpolate_position_embedding": "this package does not support it. Remove it.",
}
_NO_EFFECT: Final = "extra_attention_params"


def read_image_model(
    where: str,
    given: object,
    mode: SelectMode,
    *,
    refused: Mapping[str, str] | None = None,
    others: tuple[str, ...] = (),
) -> VisionSettings:
    """Return the settings of an image model.

    Args:
        where: The argument of the model that has them, for messages.
        given: `name` and the settings.
        mode: Which states are features.
        refused: Further keys that cannot be used, each with the reason.
        others: Keys that are settings of something else.

    Raises:
        ConfigError: If one is invalid.
    """
    settings: VisionSettings = read_settings(
        where,
        given,
        VisionSettings,
        refused={**_REFUSED, **(refused or {})},
        others=("name", _NO_EFFECT, *others),
    )
    assert isinstance(given, Mapping)
    check_name(where, given, _NAMES, "a vision transformer")
    if settings.use_masked_patches:
        raise ConfigError(
            f"model.{where}.use_masked_patches is true, but this model masks no patches, so that "
            f"nothing would train their embedding. Set it to false."
        )
    if settings.use_encoder_pooler_layer:
        raise ConfigError(
            f"model.{where}.use_encoder_pooler_layer is true, but the features are states before "
            f"that layer, so that nothing would train it. Set it to false."
        )
    if mode == "cls_patch" and not settings.prepend_cls_token:
        raise ConfigError(
            f"model.{where}.prepend_cls_token is false, but image_feature_select_mode: cls_patch "
            f"needs that token. Set it to true, or the mode to patch."
        )
    return settings


def warn_of_unused(where: str, given: Mapping[str, Any]) -> None:
    """Warn of settings without effect."""
    if given.get(_NO_EFFECT):
        warnings.warn(
            f"model.{where}.{_NO_EFFECT} ({given[_NO_EFFECT]}) has no effect (nor in the Cerebras "
            f"Model Zoo). Remove it.",
            stacklevel=3,
        )


def check_layer(where: str, layer: int | None, settings: VisionSettings) -> None:
    """Check that the image model has a layer.

    Raises:
        ConfigError: If not.
    """
    num = settings.num_hidden_layers
    if layer is not None and not -num <= layer < num:
        raise ConfigError(
            f"{where} is {layer}, but the image model has {num} layers. Set it to {-num} to "
            f"{num - 1}; -1 is the last one."
        )


def num_features(settings: VisionSettings, mode: SelectMode) -> int:
    """Return the number of features of an image, P."""
    return settings.num_patches + (mode == "cls_patch")


def features_of(
    encoder: VisionEncoder, images: Tensor, layer: int | None, mode: SelectMode
) -> Tensor:
    """Return the features of images.

    Args:
        encoder: The image model.
        images: Pixels, normalized as the data processor does.
        layer: Whose states these are; None = those after the last one and the final norm.
        mode: `patch`: of the patches; `cls_patch`: also of the class token, which is first.

    Shapes:
        images: (B, C, height, width). Returns: (B, P, H).
    """
    states = encoder(images).hidden if layer is None else encoder.states_after(images, layer)
    drops_first = mode == "patch" and encoder.settings.prepend_cls_token
    return states[:, 1:] if drops_first else states


def freeze_unused(encoder: VisionEncoder, layer: int | None) -> None:
    """Freeze what the features do not depend on: later layers, and the final norm.

    `layer`: as of `features_of`.
    """
    if layer is None:
        return
    for unused in encoder.layers[layer % len(encoder.layers) + 1 :]:
        freeze_for_good(unused)
    if encoder.final_norm is not None:
        freeze_for_good(encoder.final_norm)


def published_image_name(name: str, prefix: str) -> str | None:
    """Return the name of an encoder's parameter in the Model Zoo, None if it has none.

    Args:
        name: In the encoder.
        prefix: What contains the image model there.
    """
    found = published_name(f"encoder.{name}")
    return None if found is None else found.replace("vit_model.", prefix, 1)
