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

from pathlib import Path
from typing import Any, Final

import numpy as np

Plain = dict[str, Any]

_IMAGE, _PATCH, _CLASSES = 32, 8, 8
_HEIGHT, _WIDTH = 40, 48
_NOISE: Final = 40


def has_images(section: Plain) -> bool:
    """Return whether a `model` or a dataloader is one of images with classes."""
    names = (section.get("name"), section.get("data_processor"))
    return "vision_transformer" in names or "ImageNet1KProcessor" in names


def scale_images(section: Plain) -> None:
    """Scale sizes of images and classes of a `model` or a dataloader in place."""
    height, width = section.get("image_size") or (224, 224)
    section["image_size"] = [_IMAGE, _IMAGE]
    if "name" in section:
        section["patch_size"] = [_PATCH, _PATCH]
    if section.get("num_classes"):
        section["num_classes"] = min(section["num_classes"], _CLASSES)
    for transform in section.get("transforms") or ():
        size = transform.get("size")
        if isinstance(size, int):
            transform["size"] = round(size * _IMAGE / height)
        elif size:
            pairs = zip(size, (height, width), strict=False)
            transform["size"] = [round(one * _IMAGE / whole) for one, whole in pairs]


def write_images(folder: Path, num: int) -> None:
    """Write `num` images for each split, in the folders of all classes."""
    from PIL import Image

    draw = np.random.default_rng(1)
    stripes = (np.arange(_WIDTH) // 4 % 2)[None, :, None]
    for split in ("train", "val"):
        for number in range(num):
            label = number % _CLASSES
            place = folder / split / f"n{label:08}"
            place.mkdir(parents=True, exist_ok=True)
            colour = np.array([label & 1, label >> 1 & 1, label >> 2 & 1]) * 160 + 40
            pixels = np.broadcast_to(colour * (1 + stripes) / 2, (_HEIGHT, _WIDTH, 3))
            noise = draw.integers(-_NOISE, _NOISE + 1, pixels.shape)
            image = (pixels + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(image).save(place / f"{number:05}.png")
