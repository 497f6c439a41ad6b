"""Random blocks of patches to mask, for the images of a batch.

Source: Oquab et al. 2023, https://arxiv.org/abs/2304.07193, appendix A, with the blocks of Bao et
al. 2022, https://arxiv.org/abs/2106.08254, algorithm 1.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
from annotated_types import MaxLen, MinLen, Predicate
from numpy.typing import NDArray

from modelzoo_trainer.base.constraints import Size, UnitInterval
from modelzoo_trainer.errors import ConfigError

_LEAST_PATCHES: Final = 4  # of a block
_ASPECT: Final = 0.3  # least ratio of its sides
_TRIES: Final = 10


def _is_range(values: list[float]) -> bool:
    return values[0] <= values[1]


Ratios = Annotated[
    list[UnitInterval],
    MinLen(2),
    MaxLen(2),
    Predicate(_is_range),
    "a list of two numbers from 0 to 1, the smaller one first",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMasks:
    """Which patches of the global views of a batch are masked.

    Of N views in a batch, int(N * `mask_probability`) are masked, in random places; the shares of
    their patches are uniform in equal parts of the range `mask_ratio_tuple`, one part for each.

    Args:
        image_size: Height and width of the global views, in pixels.
        patch_size: Height and width of a patch.
        mask_probability: Share of the views of a batch that are masked.
        mask_ratio_tuple: Least and largest share of masked patches.
    """

    image_size: Size
    patch_size: Size
    mask_probability: UnitInterval
    mask_ratio_tuple: Ratios

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}. "
                f"Set both as in the model."
            )

    @property
    def side(self) -> int:
        """Patches in a row and in a column."""
        return self.image_size // self.patch_size

    def ratios(self, num: int, seed: int) -> NDArray[np.float64]:
        """Return the least and the largest share of each view of a batch, (`num`, 2); 0: none.

        Args:
            num: Views of the batch.
            seed: Of the places of the masked views.
        """
        num_masked = int(num * self.mask_probability)
        found = np.zeros((num, 2))
        least, most = self.mask_ratio_tuple
        edges = np.linspace(least, most, num_masked + 1)
        found[:num_masked, 0], found[:num_masked, 1] = edges[:-1], edges[1:]
        order = np.random.default_rng(seed).permutation(num)
        return found[order]

    def mask(self, least: float, most: float, draw: random.Random) -> NDArray[np.bool_]:
        """Return a mask of random blocks, (patches,).

        Args:
            least: Least share of masked patches; fewer are masked if no block fits.
            most: Largest share.
            draw: Gives the random numbers.
        """
        side = self.side
        found = np.zeros((side, side), np.bool_)
        wanted = int(side * side * draw.uniform(least, most)) if most else 0
        num = 0
        while num < wanted:
            room = min(wanted - num, side * side // 2)
            added = _add_block(found, room, draw)
            if not added:
                break
            num += added
        return found.reshape(-1)


def _add_block(mask: NDArray[np.bool_], room: int, draw: random.Random) -> int:
    """Mask a block with at most `room` new patches; return how many are new, 0 if none fits."""
    side = len(mask)
    span = math.log(_ASPECT), math.log(1 / _ASPECT)
    for _ in range(_TRIES):
        area = draw.uniform(_LEAST_PATCHES, room)
        ratio = math.exp(draw.uniform(*span))
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if not (0 < height < side and 0 < width < side):
            continue
        top, left = draw.randint(0, side - height), draw.randint(0, side - width)
        block = mask[top : top + height, left : left + width]
        num_new = height * width - int(block.sum())
        if 0 < num_new <= room:
            block[:] = True
            return num_new
    return 0
