"""Files of text with images, for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

from tests.zoo.data.images.written import pixels

LENGTH, FEATURES, START, HOLDER = 8, 2, 1, 7
DATA: dict[str, Any] = {
    "batch_size": 2,
    "image_data_size": [3, 8, 8],
    "transforms": [{"name": "center_crop", "size": 8}, {"name": "to_tensor"}],
    "drop_last": False,
}
Content = dict[str, Any]


def content(num: int, *, images: int = 1) -> Content:
    """Return datasets: row i has i in its first column, and shows the image i of each class."""
    rows = np.zeros((num, 4 if images == 1 else 5, LENGTH), np.int32)
    rows[:, 0] = np.arange(20, 20 + LENGTH)
    rows[:, 0, 0] = np.arange(num)
    rows[:, 0, START : START + FEATURES * images] = HOLDER
    rows[:, 2, :-1] = rows[:, 0, 1:]
    rows[:, 1, START + FEATURES * images : -1] = 1
    rows[:, 3, -1] = 1
    names = np.array([[f"c{image}/{row}.png" for image in range(images)] for row in range(num)])
    found: Content = {"data": rows, "img_path": names.astype(object)}
    if images > 1:
        places = START + np.arange(images * FEATURES).reshape(images, FEATURES)
        found["img_data_loc"] = np.repeat(places[None], num, axis=0).astype(np.int32)
    return found


def write(
    folder: Path,
    num: int = 5,
    *,
    images: int = 1,
    change: Callable[[Content], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Write two files and the images; return the arguments of a data processor."""
    made = content(num, images=images)
    if change is not None:
        change(made)
    path = folder / "rows"
    path.mkdir(parents=True)
    for name, part in (("a", slice(0, 3)), ("b", slice(3, None))):
        with h5py.File(path / f"{name}.h5", "w") as file:
            for key, values in made.items():
                kind = h5py.string_dtype() if values.dtype == object else values.dtype
                chunks = (1, *values.shape[1:]) if options else None
                file.create_dataset(key, data=values[part], dtype=kind, chunks=chunks, **options)
    for label in range(images):
        place = folder / "images" / f"c{label}"
        place.mkdir(parents=True)
        for number in range(num):
            Image.fromarray(pixels(label, number)).save(place / f"{number}.png")
    return {**DATA, "data_dir": str(path), "img_data_dir": str(folder / "images")}
