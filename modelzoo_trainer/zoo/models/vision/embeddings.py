"""Embeddings of images: patches, the class token, positions.

Dimension letters: B batch, C channels, P patches, T tokens (P, and 1 for the class token), H hidden
size, R rows and K columns of patches.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.encoder import Step, draw_weight
from modelzoo_trainer.zoo.models.decoder_layers import reset_plain
from modelzoo_trainer.zoo.models.initializers import Initializer
from modelzoo_trainer.zoo.models.vision.local_positions import LocalPositions
from modelzoo_trainer.zoo.models.vision.settings import VisionSettings

_POST_EMBED_EPSILON = 1e-5


class LearnedToken(nn.Module):
    """One trained token.

    Shapes:
        weight: (H,).
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def reset_parameters(self) -> None:
        """Set the weight to 0."""
        nn.init.zeros_(self.weight)

    def draw(self, initializer: Initializer) -> None:
        """Initialize the weight."""
        initializer(self.weight.view(1, -1))

    def forward(self) -> Tensor:
        """Return the token."""
        return self.weight


class PatchEmbedding(nn.Module):
    """Cut images into patches, row by row, and project each to the width of the model."""

    def __init__(self, settings: VisionSettings) -> None:
        super().__init__()
        size, channels, bias = (
            settings.hidden_size,
            settings.num_channels,
            settings.use_embed_proj_bias,
        )
        self.patch = settings.patch
        self.projection: nn.Conv2d | nn.Linear
        if settings.use_conv_patchified_embedding:
            self.projection = nn.Conv2d(
                channels, size, kernel_size=self.patch, stride=self.patch, bias=bias
            )
        else:
            self.projection = nn.Linear(self.patch[0] * self.patch[1] * channels, size, bias=bias)

    def draw(self, initializer: Initializer, *, like_linear: bool = True) -> None:
        """Initialize the weight; the bias is 0.

        `like_linear`: as a matrix (H, inputs), also in a convolution.
        """
        weight = self.projection.weight
        initializer(weight.flatten(1) if like_linear else weight)
        if self.projection.bias is not None:
            nn.init.zeros_(self.projection.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the embedded patches.

        Shapes:
            images: (B, C, height, width). Returns: (B, P, H).
        """
        images = images.to(self.projection.weight.dtype)
        if isinstance(self.projection, nn.Conv2d):
            convolved: Tensor = self.projection(images)
            return convolved.flatten(2).transpose(1, 2)
        height, width = self.patch
        rows, columns = images.shape[2] // height, images.shape[3] // width
        size = (*images.shape[:2], rows, height, columns, width)
        cut = images.reshape(size)  # (B, C, R, h, K, w)
        projected: Tensor = self.projection(cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2))
        return projected


class ImageEmbedding(nn.Module):
    """Patches (some masked), the class token before them, positions, normalization, dropout.

    The table of learned positions has the patches first, and the class token last.
    """

    def __init__(self, settings: VisionSettings) -> None:
        super().__init__()
        size = settings.hidden_size
        self._settings = (settings,)  # in a tuple: the model, its parent, is no part of this
        self.patches = PatchEmbedding(settings)
        self.cls_token = LearnedToken(size) if settings.prepend_cls_token else None
        self.mask_token = LearnedToken(size) if settings.use_masked_patches else None
        self.position_embeddings: nn.Embedding | None = None
        if settings.position_embedding_type == "learned":
            num = settings.num_patches + settings.prepend_cls_token
            self.position_embeddings = nn.Embedding(num, size)
        self.local_positions: LocalPositions | None = None
        if settings.local is not None:
            self.local_positions = LocalPositions(settings.grid, settings.local)
        self.dropout = nn.Dropout(settings.embedding_dropout_rate)
        self.norm: nn.LayerNorm | None = None
        if settings.use_post_embed_layer_norm:
            self.norm = nn.LayerNorm(size, eps=_POST_EMBED_EPSILON)

    def initial_steps(self) -> Iterator[Step]:
        """Yield the parts, each with the function that initializes it."""
        start = self._settings[0].initializers()
        yield self.patches, partial(self.patches.draw, start["projection"])
        if self.cls_token is not None:
            yield self.cls_token, partial(self.cls_token.draw, start["cls_token"])
        if self.mask_token is not None:
            yield self.mask_token, self.mask_token.reset_parameters
        table = self.position_embeddings
        if table is not None:
            yield table, partial(draw_weight, table, start["position_embedding"])
        if self.local_positions is not None:
            yield self.local_positions, self.local_positions.reset_parameters
        if self.norm is not None:
            yield self.norm, partial(reset_plain, self.norm)

    def forward(self, images: Tensor, masked: Tensor | None = None) -> Tensor:
        """Return the states that the first layer gets.

        `masked`: which patches are replaced by the token for masked ones.

        Shapes:
            images: (B, C, height, width) floating. masked: (B, P) bool. Returns: (B, T, H).

        Raises:
            ConfigError: If the images do not fit, or patches are masked without
                `use_masked_patches`.
        """
        is_local = self._is_local(images)
        hidden = self.patches(images)
        if masked is not None:
            hidden = self._masked(hidden, masked)
        if self.cls_token is not None:
            first = self.cls_token().to(hidden.dtype).expand(hidden.shape[0], 1, -1)
            hidden = torch.cat((first, hidden), dim=1)
        hidden = self._add_positions(hidden, is_local=is_local)
        found: Tensor = self.dropout(hidden)
        if self.norm is not None:
            found = self.norm(found)
        return found

    def _is_local(self, images: Tensor) -> bool:
        """Return whether these are the smaller images, whose positions are interpolated."""
        settings, local = self._settings[0], self._settings[0].local
        shape = tuple(images.shape[1:])
        sizes = [settings.image]
        if local is not None:
            sizes.append((local.rows * settings.patch[0], local.columns * settings.patch[1]))
        for size in sizes:
            if shape == (settings.num_channels, *size):
                return size != settings.image
        expected = " or ".join(
            f"(batch, {settings.num_channels}, {height}, {width})" for height, width in sizes
        )
        raise ConfigError(
            f"The batch has images of the shape {tuple(images.shape)}, but the model requires "
            f"{expected}, from num_channels and image_size. Set the same image_size in the data "
            f"processor and the model."
        )

    def _masked(self, hidden: Tensor, masked: Tensor) -> Tensor:
        if self.mask_token is None:
            raise ConfigError(
                "Patches are masked, but the model has no embedding for masked ones. Set "
                "use_masked_patches: true."
            )
        if masked.shape != hidden.shape[:2]:
            raise ConfigError(
                f"The masks have the shape {tuple(masked.shape)}, but the images have the patches "
                f"{tuple(hidden.shape[:2])}. Set the same image_size and patch_size for the masks "
                f"and the model."
            )
        return torch.where(masked[..., None], self.mask_token().to(hidden.dtype), hidden)

    def _add_positions(self, hidden: Tensor, *, is_local: bool) -> Tensor:
        settings, device = self._settings[0], hidden.device
        num = settings.num_patches
        if self.position_embeddings is not None:
            rows = torch.arange(num, device=device)
            if self.cls_token is not None:
                rows = torch.cat((torch.full((1,), num, device=device), rows))
            table: Tensor = self.position_embeddings(rows)
            if is_local and self.local_positions is not None:
                first = len(rows) - num
                table = torch.cat((table[:first], self.local_positions(table[first:])))
            return hidden + table
        if settings.position_embedding_type == "fixed":
            waves = grid_positions(settings.grid, settings.hidden_size, device)
            if self.cls_token is not None:
                waves = torch.nn.functional.pad(waves, (0, 0, 1, 0))
            return hidden + waves.to(hidden.dtype)
        return hidden


def grid_positions(grid: tuple[int, int], size: int, device: torch.device) -> Tensor:
    """Return constant embeddings of the patches of an image, row by row.

    The first half of the channels is of the column, the second of the row; each half has sines,
    then cosines, of place * 10000^(-i / (H / 4)).

    Source: Peebles and Xie 2023, https://arxiv.org/abs/2212.09748, after He et al. 2022,
    https://arxiv.org/abs/2111.06377.

    Shapes:
        `grid` is (R, K), `size` is H, a multiple of 4. Returns: (R * K, H), float32.
    """
    steps = torch.arange(size // 4, device=device, dtype=torch.float32)
    frequencies = 10000.0 ** (-steps / (size // 4))

    def waves(num: int) -> Tensor:
        angles = torch.arange(num, device=device, dtype=torch.float32)[:, None] * frequencies
        return torch.cat((angles.sin(), angles.cos()), dim=-1)

    rows = waves(grid[0])[:, None].expand(-1, grid[1], -1)
    columns = waves(grid[1])[None].expand(grid[0], -1, -1)
    return torch.cat((columns, rows), dim=-1).flatten(0, 1)
