"""Images whose pixels say which class and image they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def pixels(label: int, number: int, size: tuple[int, int] = (12, 8)) -> NDArray[np.uint8]:
    """Return an image of height and width `size`: red is the class, green the image, blue x."""
    height, width = size
    found = np.zeros((height, width, 3), np.uint8)
    found[..., 0], found[..., 1] = label * 10, number * 10
    found[..., 2] = np.arange(width) * 3
    return found


def write_images(
    folder: Path, num_classes: int, num_images: int, size: tuple[int, int] = (12, 8)
) -> None:
    """Write PNG files `c0/0.png` and so on."""
    for label in range(num_classes):
        place = folder / f"c{label}"
        place.mkdir(parents=True)
        for number in range(num_images):
            Image.fromarray(pixels(label, number, size)).save(place / f"{number}.png")


def moments(label: int, number: int, channels: int = 2) -> NDArray[np.float16]:
    """Return mean and log-variance of a latent of 4 x 6, which say which class and file it is."""
    mean = np.full((channels, 4, 6), label * 10 + number, np.float16)
    return np.concatenate((mean, np.full_like(mean, -20)))


def write_latents(folder: Path, num_classes: int, num_files: int, offset: int = 0) -> None:
    """Write files `c0/0.npz` and so on; the numbers in them begin with `offset`."""
    for label in range(num_classes):
        place = folder / f"c{label}"
        place.mkdir(parents=True)
        for number in range(num_files):
            path = place / f"{number}.npz"
            values = moments(label, number + offset)
            np.savez(path, vae_output=values, label=np.int64(label), dest_path=str(path))
