"""Several random crops of an image, each with its own transforms."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from modelzoo_trainer.base.constraints import NonNegativeSize, Size
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.images.transform import Hw
from modelzoo_trainer.zoo.data.images.transforms import (
    Pipeline,
    RandomResizedCrop,
    Range,
    parse_transforms,
)

LIST: Final = "multicrop_transform_list"
_MAX_BYTE: Final = 255
_PER_CHANNEL: Final = ("mean", "std", "scale", "ratio", "size", "background_color")


@dataclass(frozen=True, slots=True, kw_only=True)
class CropSettings:
    """Settings of the crops.

    Args:
        global_num_crops: Number G of global crops of an image.
        local_num_crops: Number L of local ones.
        global_image_size: Height and width of global crops.
        local_image_size: Of local ones.
        global_crops_scale: Least and largest area of a global crop, as a share of the image.
        local_crops_scale: Of a local one.
        multicrop_transform_list: The transforms after the crop. An argument that is a list of
            G + L values has one for each crop, the global ones first.
        interpolation: How crops are resized.
    """

    global_num_crops: Size
    local_num_crops: NonNegativeSize
    global_image_size: Size
    local_image_size: Size
    global_crops_scale: Range
    local_crops_scale: Range
    multicrop_transform_list: list[dict[str, Any]]
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"

    @property
    def num(self) -> int:
        """Number of crops."""
        return self.global_num_crops + self.local_num_crops

    def __post_init__(self) -> None:
        self.crops(LIST)

    def crops(self, where: str) -> list[Crop]:
        """Return the crops of an image, the global ones first.

        Raises:
            ConfigError: If a transform is invalid; `where`: the place of the list.
        """
        found = []
        for number in range(self.num):
            is_global = number < self.global_num_crops
            side = self.global_image_size if is_global else self.local_image_size
            first = RandomResizedCrop(
                size=side,
                scale=self.global_crops_scale if is_global else self.local_crops_scale,
                interpolation=self.interpolation,
            )
            pipeline = parse_transforms(self._of_crop(number), where)
            size: Hw | None = (side, side)
            for one in pipeline.images:
                size = one.size_after(size)
            if size != (side, side):
                raise ConfigError(
                    f"{where}: crops of {side} x {side} pixels become {size}. Remove the transform "
                    f"that changes their size."
                )
            found.append(Crop(first, pipeline, side))
        return found

    def _of_crop(self, number: int) -> list[Any]:
        """Return the transforms of a crop, with its own values of arguments that are lists."""
        return [
            {key: self._value(key, value, number) for key, value in one.items()}
            if isinstance(one, Mapping)
            else one
            for one in self.multicrop_transform_list
        ]

    def _value(self, key: str, value: Any, number: int) -> Any:
        if not isinstance(value, list) or len(value) != self.num:
            return value
        is_list_itself = key in _PER_CHANNEL and not isinstance(value[0], list)
        return value if is_list_itself else value[number]


@dataclass(frozen=True, slots=True)
class Crop:
    """One of the crops of an image.

    Args:
        first: Cuts it out.
        pipeline: The transforms after that.
        side: Its height and width.
    """

    first: RandomResizedCrop
    pipeline: Pipeline
    side: int

    def __call__(self, image: Any, draw: random.Random) -> Any:
        """Return the crop of an image."""
        found = self.first(image, draw)
        for transform in self.pipeline.images:
            found = transform(found, draw)
        return found


def stacked(images: Sequence[Sequence[Any]], crops: Sequence[Crop]) -> Tensor:
    """Return crops of equal size as numbers, normalized.

    Args:
        images: The crops of each image.
        crops: How they were made.

    Shapes:
        Returns: (images, crops, 3, height, width), float32.
    """
    side = crops[0].side if crops else 1
    pixels = np.empty((len(images), len(crops), side, side, 3), np.uint8)
    for row, own in enumerate(images):
        for column, image in enumerate(own):
            pixels[row, column] = np.asarray(image)
    found = torch.from_numpy(pixels).permute(0, 1, 4, 2, 3).contiguous().float().div_(_MAX_BYTE)
    for column, crop in enumerate(crops):
        for one in crop.pipeline.numbers:
            mean, std = (torch.tensor(values).view(3, 1, 1) for values in (one.mean, one.std))
            found[:, column].sub_(mean).div_(std)
    return found
