"""From images in a column of a dataset to the pixels that a model takes.

Dimension letters: C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from annotated_types import MinLen

from modelzoo_trainer.base.constraints import FiniteFloat, FinitePositiveFloat, HeightAndWidth, Size
from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.zoo.data.hugging_face.source import OWNER
from modelzoo_trainer.zoo.data.images.decoding import pillow, read_rgb
from modelzoo_trainer.zoo.hugging_face.folders import (
    HUB_NAME,
    SETTINGS_PATTERNS,
    local_folder,
    transformers_library,
)

ImageSize = Size | HeightAndWidth
Channels = Literal[1, 3]
Means = Annotated[list[FiniteFloat], MinLen(1)]
Deviations = Annotated[list[FinitePositiveFloat], MinLen(1)]

_BRIGHTEST: Final = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelSettings:
    """How images become pixels, as the arguments of the data processor say.

    Args:
        image_size: Height and width, or one number for both; None = the images' size.
        image_channels: 3 = red, green and blue, 1 = grey.
        image_mean: What is subtracted from pixels in [0, 1], per channel; None = 0.
        image_std: What they are divided by then; None = 1.
        image_processor: Folder or name of an image processor of `transformers`, instead of these.
    """

    image_size: ImageSize | None = None
    image_channels: Channels = 3
    image_mean: Means | None = None
    image_std: Deviations | None = None
    image_processor: str | None = None

    def check(self) -> None:
        """Check the arguments.

        Raises:
            ConfigError: If they exclude each other, or there is not a number for each channel.
        """
        own = [key for key, value in asdict(self).items() if value not in (None, 3)]
        if self.image_processor is not None and len(own) > 1:
            raise ConfigError(
                f"{OWNER}.{own[0]} has no effect with image_processor, whose folder says how "
                f"pixels are made. Remove one of them."
            )
        for key, values in (("image_mean", self.image_mean), ("image_std", self.image_std)):
            if values is not None and len(values) not in (1, self.image_channels):
                raise ConfigError(
                    f"{OWNER}.{key}: expected {self.image_channels} numbers, one for each of "
                    f"image_channels, got {len(values)}."
                )

    def missing(self) -> list[str]:
        """Return a message if the image processor is neither here nor a name of the Hub."""
        name = self.image_processor
        if name is None or Path(name).expanduser().is_dir() or HUB_NAME.fullmatch(name):
            return []
        return [
            f"{OWNER}.image_processor: there is no folder {name!r}. Give one that exists, or a "
            f"name of the Hub."
        ]


class Pixels:
    """Makes pixels of images. It can be pickled.

    Args:
        settings: How.

    Raises:
        ConfigError: If the image processor cannot be loaded.
    """

    def __init__(self, settings: PixelSettings) -> None:
        self._settings = settings
        settings.check()
        pillow()
        if settings.image_processor is not None:
            self._library_processor  # noqa: B018  # raises if it cannot be loaded

    def of(self, value: Any, where: str) -> npt.NDArray[np.float32]:
        """Return the pixels of an image.

        Args:
            value: What `datasets` returns of an image that it does not decode.
            where: The row, for messages.

        Raises:
            ConfigError: If it cannot be decoded.

        Shapes:
            Returns: (C, H, W).
        """
        given: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
        data, path = given.get("bytes"), given.get("path")
        if data is None and path is None:
            raise ConfigError(f"{where}: there is no image. Remove the row.")
        image = read_rgb(str(path)) if data is None else read_rgb(where, data)
        if self._settings.image_processor is not None:
            found = self._library_processor(images=[image], return_tensors="np")
            return np.asarray(found["pixel_values"][0], np.float32)
        return self._plain(image)

    def _plain(self, image: Any) -> npt.NDArray[np.float32]:
        settings = self._settings
        if settings.image_channels == 1:
            image = image.convert("L")
        if settings.image_size is not None:
            size = settings.image_size
            height, width = size if isinstance(size, list) else (size, size)
            image = image.resize((width, height), pillow().Resampling.BILINEAR)
        values: Any = np.asarray(image, np.float32) / _BRIGHTEST
        values = values.reshape(*values.shape[:2], -1)
        if settings.image_mean is not None:
            values = values - np.array(settings.image_mean, np.float32)
        if settings.image_std is not None:
            values = values / np.array(settings.image_std, np.float32)
        return np.moveaxis(values, -1, 0)

    @cached_property
    def _library_processor(self) -> Any:
        name = str(self._settings.image_processor)
        key = f"{OWNER}.image_processor"
        transformers = transformers_library(key)
        folder = local_folder(name, key=key, patterns=SETTINGS_PATTERNS)
        try:
            return transformers.AutoImageProcessor.from_pretrained(folder)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(
                f"{key}: {name!r} has no image processor that can be loaded "
                f"({reason_of(error).splitlines()[0]}). Give a folder with "
                f"preprocessor_config.json, or remove image_processor."
            ) from error
