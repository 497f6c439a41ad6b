"""Read images through transforms, all of one size in the end."""

from __future__ import annotations

import random
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.seeded_sampler import mixed_seed
from modelzoo_trainer.zoo.data.images.decoding import read_rgb
from modelzoo_trainer.zoo.data.images.transform import Hw
from modelzoo_trainer.zoo.data.images.transforms import Pipeline

_MAX_BYTE: Final = 255


class ImageReader:
    """Read images through transforms.

    Args:
        pipeline: The transforms.
        size: Height and width after them.
        argument: What gives the size, for messages.
        seed: Of random transforms, which depend on it, the epoch and the image alone.
    """

    def __init__(self, pipeline: Pipeline, size: Hw, argument: str, seed: int) -> None:
        self.pipeline = pipeline
        self.size = size
        self._argument = argument
        self._seed = seed
        self.epoch = 0

    def empty(self, *num: int) -> NDArray[np.uint8]:
        """Return room for the pixels of images, black.

        Shapes:
            Returns: (*num, height, width, 3).
        """
        return np.zeros((*num, *self.size, 3), np.uint8)

    def read(self, path: str, index: int) -> NDArray[np.uint8]:
        """Return the pixels of an image after the transforms.

        `index`: of the image, for random transforms.

        Shapes:
            Returns: (height, width, 3).

        Raises:
            ConfigError: With the path, if it cannot be read or has another size.
        """
        return self.changed(read_rgb(path), path, index)

    def changed(self, image: Any, path: str, index: int) -> NDArray[np.uint8]:
        """Return the pixels of an image of Pillow after the transforms; see `read`."""
        if self.pipeline.images:
            draw = random.Random(mixed_seed(self._seed, self.epoch, index))
            try:
                for transform in self.pipeline.images:
                    image = transform(image, draw)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
        if (image.height, image.width) != self.size:
            height, width = self.size
            raise ConfigError(
                f"{path}: the image has {image.height} x {image.width} pixels after its "
                f"transforms, but {self._argument} is {height} x {width}. Add a transform such as "
                f"center_crop."
            )
        return np.asarray(image)

    def numbers(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Return pixels as numbers from 0 to 1, normalized if there are such transforms.

        Shapes:
            pixels: (..., height, width, 3). Returns: (..., 3, height, width), float32.
        """
        images = torch.from_numpy(pixels).movedim(-1, -3).contiguous().float().div_(_MAX_BYTE)
        for one in self.pipeline.numbers:
            mean, std = (torch.tensor(values).view(3, 1, 1) for values in (one.mean, one.std))
            images.sub_(mean).div_(std)
        return images
