"""The vision transformer as a part of another model: several images per sample, masked patches.

Dimension letters: B batch, V views of a sample, C channels, P patches, T tokens (P and the class
token), H hidden size.
"""

# Annotations are evaluated here: the fields are read for the checks of settings.
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from modelzoo_trainer.base.constraints import Fraction, HeightAndWidth, checked_dataclass
from modelzoo_trainer.base.nested_settings import made
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.vision.encoder import VisionEncoder
from modelzoo_trainer.zoo.models.vision.settings import LocalGrid, VisionSettings


@checked_dataclass(kw_only=True)
class InterpolationSettings:
    """How learned positions are interpolated for smaller images.

    Args:
        local_patch_dims: Rows and columns of patches of the smaller images.
        interpolate_offset: Added to them when their ratios to the model's are computed, less
            than 1.
        antialias: Whether the interpolation averages over the patches that one covers.
    """

    local_patch_dims: HeightAndWidth
    interpolate_offset: Fraction = 0.1
    antialias: bool = False


@checked_dataclass(kw_only=True)
class MultiImageSettings(VisionSettings):
    """Settings of a vision transformer that gets several images per sample.

    Args:
        interpolate_position_embedding: `local_patch_dims`, `interpolate_offset` and `antialias` of
            smaller images that the model gets as well; null = it gets none.
    """

    interpolate_position_embedding: dict[str, Any] | None = None

    @override
    def __post_init__(self) -> None:
        given = self.interpolate_position_embedding
        self._local: LocalGrid | None = None
        super().__post_init__()
        if not self.prepend_cls_token:
            raise ConfigError(
                "prepend_cls_token is false, but heads get the state of that token. Set "
                "prepend_cls_token: true."
            )
        if given is None:
            return
        found = made(InterpolationSettings, given, "interpolate_position_embedding")
        if self.position_embedding_type != "learned":
            raise ConfigError(
                f"interpolate_position_embedding is set, but position_embedding_type is "
                f"{self.position_embedding_type!r}: only learned positions are interpolated. Set "
                f"position_embedding_type: learned."
            )
        rows, columns = found.local_patch_dims
        if rows > self.grid[0] or columns > self.grid[1]:
            raise ConfigError(
                f"interpolate_position_embedding.local_patch_dims is {[rows, columns]}, but the "
                f"images of the model have {list(self.grid)} patches. Use smaller numbers."
            )
        self._local = LocalGrid(rows, columns, found.interpolate_offset, found.antialias)

    @property
    @override
    def local(self) -> LocalGrid | None:
        return self._local


class MultiImageViT(nn.Module):
    """A vision transformer whose batches have several images per sample.

    Args:
        settings: Of the encoder.
    """

    def __init__(self, settings: MultiImageSettings) -> None:
        super().__init__()
        self.encoder = VisionEncoder(settings)

    def forward(
        self, images: Tensor, labels: None = None, masked: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return all states, and the states of the class token.

        Args:
            images: Of the model's size, or of the size of its smaller images.
            labels: Not used.
            masked: Which patches are replaced by the token for masked ones; None = none.

        Shapes:
            images: (B, V, C, height, width) floating. masked: (B, V, P) bool. Returns:
            (B, V, T, H), the class token first, and (B, V, H).

        Raises:
            ConfigError: If the images or the masks do not fit the model.
        """
        if images.dim() != 5 or not images.is_floating_point():
            raise ConfigError(
                f"The trunk requires floating-point images of the shape (batch, views, channels, "
                f"height, width), but got {images.dtype} of the shape {tuple(images.shape)}. Check "
                f"the entry of the batch in forward_args, and the data processor."
            )
        if masked is not None:
            check_masks("The trunk", masked)
        self._check_size(*images.shape[3:])
        views = images.shape[:2]  # (B, V)
        states = self.encoder(
            images.flatten(0, 1), None if masked is None else masked.flatten(0, 1)
        )
        pooled = self.encoder.pool(states.cls)
        return states.hidden.view(*views, *states.hidden.shape[1:]), pooled.view(*views, -1)

    def _check_size(self, height: int, width: int) -> None:
        """Check that smaller images have positions; others are checked by the encoder."""
        settings = self.encoder.settings
        is_smaller = (height, width) != settings.image and (
            height <= settings.image[0] and width <= settings.image[1]
        )
        if is_smaller and settings.local is None and settings.position_embedding_type == "learned":
            grid = [height // settings.patch[0], width // settings.patch[1]]
            raise ConfigError(
                f"The trunk got images of {height} x {width} pixels, smaller than its image_size "
                f"{list(settings.image)}, but has no positions for them. Set "
                f"interpolate_position_embedding.local_patch_dims, to {grid} for these images."
            )


def check_masks(name: str, masked: Tensor) -> None:
    """Check that masks of patches are bool.

    Raises:
        ConfigError: With the dtype; `name`: what gets them, for the message.
    """
    if masked.dtype != torch.bool:
        raise ConfigError(
            f"{name} requires masks of patches as torch.bool, but got {masked.dtype}. Check the "
            f"entry of the batch in forward_args, and the data processor."
        )
