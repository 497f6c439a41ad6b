"""Random transforms of colours and sharpness, with the formulas of torchvision.

https://pytorch.org/vision/stable/transforms.html
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from annotated_types import Ge, Le

from modelzoo_trainer.base.constraints import NonNegativeFloat
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.images.decoding import pillow
from modelzoo_trainer.zoo.data.images.transform import Probability, Transform

HueShift = Annotated[float, Ge(0), Le(0.5)]
_MAX_BYTE: Final = 255
_NUM_BYTES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ColorJitter(Transform):
    """Change brightness, contrast, saturation and hue by random amounts, in a random order.

    Args:
        brightness: The factor is uniform from max(0, 1 - it) to 1 + it; 0 = unchanged.
        contrast: Likewise.
        saturation: Likewise.
        hue: The shift is uniform from -it to it, where 1 is the whole circle; 0 = unchanged.
        p: Probability; 0 = always, as in the Cerebras Model Zoo.
    """

    brightness: NonNegativeFloat = 0.0
    contrast: NonNegativeFloat = 0.0
    saturation: NonNegativeFloat = 0.0
    hue: HueShift = 0.0
    p: Probability = 0.0

    def __call__(self, image: Any, draw: random.Random) -> Any:
        """Return the image, or the changed one."""
        if self.p > 0 and draw.random() >= self.p:
            return image
        changes: list[Callable[[Any], Any]] = []
        for name, most in (
            ("Brightness", self.brightness),
            ("Contrast", self.contrast),
            ("Color", self.saturation),
        ):
            if most:
                changes.append(_Enhance(name, draw.uniform(max(0.0, 1 - most), 1 + most)))
        if self.hue:
            changes.append(_ShiftHue(draw.uniform(-self.hue, self.hue)))
        draw.shuffle(changes)
        for change in changes:
            image = change(image)
        return image


@dataclass(frozen=True, slots=True)
class _Enhance:
    name: str  # of Pillow's class
    factor: float

    def __call__(self, image: Any) -> Any:
        return getattr(pillow("ImageEnhance"), self.name)(image).enhance(self.factor)


@dataclass(frozen=True, slots=True)
class _ShiftHue:
    share: float  # of the circle

    def __call__(self, image: Any) -> Any:
        hue, saturation, value = image.convert("HSV").split()
        steps = int(self.share * _MAX_BYTE) % _NUM_BYTES
        moved = np.asarray(hue) + np.uint8(steps)  # bytes wrap around
        bands = (pillow().fromarray(moved), saturation, value)
        return pillow().merge("HSV", bands).convert("RGB")


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianBlur(Transform):
    """Blur with a random radius.

    Args:
        p: Probability.
        radius_min: Least radius, in pixels.
        radius_max: Largest radius.
    """

    p: Probability = 0.5
    radius_min: NonNegativeFloat = 1.0
    radius_max: NonNegativeFloat = 2.0

    def __post_init__(self) -> None:
        if self.radius_min > self.radius_max:
            raise ConfigError(
                f"radius_min is {self.radius_min}, but radius_max is {self.radius_max}. Exchange "
                f"them."
            )

    def __call__(self, image: Any, draw: random.Random) -> Any:
        """Return the image, or the blurred one."""
        if draw.random() >= self.p:
            return image
        radius = draw.uniform(self.radius_min, self.radius_max)
        return image.filter(pillow("ImageFilter").GaussianBlur(radius))


@dataclass(frozen=True, slots=True, kw_only=True)
class Solarize(Transform):
    """Invert all values from a threshold on.

    Args:
        threshold: From 0 to 256.
        p: Probability.
    """

    threshold: Annotated[float, Ge(0), Le(256)]
    p: Probability = 0.5

    def __call__(self, image: Any, draw: random.Random) -> Any:
        """Return the image, or the changed one."""
        if draw.random() >= self.p:
            return image
        return pillow("ImageOps").solarize(image, self.threshold)
