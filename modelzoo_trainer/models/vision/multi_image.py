"""The vision transformer as a part of another model: several images per sample, masked patches.

Dimension letters: B batch, V views of a sample, C channels, P patches, T tokens (P and the class
token), H hidden size.
"""

# Annotations are evaluated here: the fields are read for the checks of settings.
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from modelzoo_trainer.constraints import Fraction, HeightAndWidth, checked
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.models.vision.encoder import VisionEncoder
from modelzoo_trainer.models.vision.settings import LocalGrid, VisionSettings
from modelzoo_trainer.nested_settings import made


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
class InterpolationSettings:
    """How learned positions are interpolated for smaller images.

    Args:
        local_patch_dims: Rows and columns of patches of the smaller images.
        interpolate_offset: Added to them when their ratios to those of the model are computed, less
            than 1.
        antialias: Whether the interpolation averages over the patches that one covers.
    """

    local_patch_dims: HeightAndWidth
    interpolate_offset: Fraction = 0.1
    antialias: bool = False


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
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
        """Return all states, and those of the class token.

        Args:
            images: Of the model's size, or of that of its smaller images.
            labels: Not used.
            masked: Which patches are replaced by the token for masked ones; None = none.

        Shapes:
            images: (B, V, C, height, width) floating. masked: (B, V, P) bool. Returns:
            (B, V, T, H), the class token first, and (B, V, H).

        Raises:
            ConfigError: If the images or the masks do not fit the model.
        """
        views = images.shape[:2]  # (B, V)
        states = self.encoder(
            images.flatten(0, 1), None if masked is None else masked.flatten(0, 1)
        )
        pooled = self.encoder.pool(states.cls)
        return states.hidden.view(*views, *states.hidden.shape[1:]), pooled.view(*views, -1)
