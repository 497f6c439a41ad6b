"""Positions of smaller images, interpolated from the table of a model's own size.

Dimension letters: R rows and K columns of patches of the model, r and k of the smaller
images, H hidden size.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelzoo_trainer.zoo.models.autocast import without_autocast
from modelzoo_trainer.zoo.models.vision.settings import LocalGrid

_AXES: Final = ("rows", "columns")


class LocalPositions(nn.Module):
    """Bicubic interpolation as two fixed matrices, of the rows and of the columns.

    They are buffers that are not saved.

    Args:
        grid: Rows and columns of patches of the model.
        local: Rows and columns of patches of the smaller images.
    """

    rows: Tensor  # (r, R)
    columns: Tensor  # (k, K)

    def __init__(self, grid: tuple[int, int], local: LocalGrid) -> None:
        super().__init__()
        self.grid, self.local = grid, local
        for name, num, new in zip(_AXES, grid, (local.rows, local.columns), strict=True):
            self.register_buffer(name, torch.zeros(new, num), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the matrices."""
        local = self.local
        for name, num, new in zip(_AXES, self.grid, (local.rows, local.columns), strict=True):
            weights = axis_weights(num, new, local.offset, antialias=local.antialias)
            getattr(self, name).copy_(weights)

    def forward(self, table: Tensor) -> Tensor:
        """Return the positions of the smaller images, row by row.

        Shapes:
            table: (R * K, H). Returns: (r * k, H).
        """
        with without_autocast(table.device.type):
            dtype = torch.promote_types(table.dtype, torch.float32)
            places = table.to(dtype).view(*self.grid, -1)
            places = torch.einsum("rR,RKh->rKh", self.rows.to(dtype), places)
            found = torch.einsum("kK,rKh->rkh", self.columns.to(dtype), places)
        return found.flatten(0, 1).to(table.dtype)


def axis_weights(num: int, new: int, offset: float, *, antialias: bool) -> Tensor:
    """Return the weights of `num` places in `new` interpolated ones, on the host.

    As in torch's bicubic interpolation with the scale factor (new + offset) / num; with an
    offset of 0, new / num exactly.

    Shapes:
        Returns: (new, num), float64.
    """
    places = torch.eye(num, dtype=torch.float64, device="cpu").view(1, 1, num, num)
    size: dict[str, Any] = (
        {"scale_factor": ((new + offset) / num, 1.0)} if offset else {"size": (new, num)}
    )
    found: Tensor = functional.interpolate(
        places,
        mode="bicubic",
        align_corners=False,
        antialias=antialias,
        **size,
    )
    return found[0, 0]
