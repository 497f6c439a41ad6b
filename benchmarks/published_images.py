"""Published models of images and their folders of classes, scaled down.

The rule, besides that of `published_scaling.py`:

| setting | becomes |
|---|---|
| `image_size` | 32 x 32 |
| `patch_size` | 8 x 8 |
| sizes in `transforms` | in proportion to the image size |
| `num_classes` | at most 8 |
| data | PNG images of 40 x 48 pixels: stripes in a colour of the class, with noise |
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Plain = dict[str, Any]

IMAGE: Final = 32
PATCH: Final = 8
_CLASSES: Final = 8
_HEIGHT, _WIDTH = 40, 48
_NOISE: Final = 40


def has_images(section: Plain) -> bool:
    """Return whether a `model`, also inside another one, or a dataloader is one of images."""
    names = (section.get("name"), section.get("data_processor"))
    return not {*names}.isdisjoint(("vision_transformer", "ViTModel", "ImageNet1KProcessor"))


def scale_images(section: Plain) -> None:
    """Scale sizes of images and classes of a `model` or a dataloader in place."""
    height, width = section.get("image_size") or (224, 224)
    section["image_size"] = [IMAGE, IMAGE]
    if "name" in section:
        section["patch_size"] = [PATCH, PATCH]
    if section.get("num_classes"):
        section["num_classes"] = min(section["num_classes"], _CLASSES)
    scale_transforms(section.get("transforms") or (), (height, width))


def scale_transforms(transforms: Iterable[Plain], image: tuple[int, int]) -> None:
    """Scale sizes in transforms in place; `image`: height and width before."""
    for transform in transforms:
        size = transform.get("size")
        if isinstance(size, int):
            transform["size"] = round(size * IMAGE / image[0])
        elif size:
            pairs = zip(size, image, strict=False)
            transform["size"] = [round(one * IMAGE / whole) for one, whole in pairs]


def write_images(folder: Path, num: int) -> None:
    """Write `num` images for each split, in the folders of all classes."""
    from PIL import Image

    draw = np.random.default_rng(1)
    for split in ("train", "val"):
        for number in range(num):
            label = number % _CLASSES
            place = folder / split / f"n{label:08}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(striped(label, draw)).save(place / f"{number:05}.png")


def striped(label: int, draw: np.random.Generator) -> NDArray[np.uint8]:
    """Return an image of stripes in one of eight colours, with noise."""
    stripes = (np.arange(_WIDTH) // 4 % 2)[None, :, None]
    colour = np.array([label & 1, label >> 1 & 1, label >> 2 & 1]) * 160 + 40
    pixels = np.broadcast_to(colour * (1 + stripes) / 2, (_HEIGHT, _WIDTH, 3))
    noise = draw.integers(-_NOISE, _NOISE + 1, pixels.shape)
    found: NDArray[np.uint8] = (pixels + noise).clip(0, 255).astype(np.uint8)
    return found
