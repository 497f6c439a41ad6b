"""Published models that see images, and their rows with images, scaled down.

The rule, besides those of `published_scaling.py` and `published_images.py`:

| setting | becomes |
|---|---|
| `image_start_idx` | in proportion to T, at least 1 |
| `input_unit`, `layers_units` of projectors | the hidden sizes of the models |
| `image_data_size` | 3 x 32 x 32 |
| data | captions, a token for each byte, of images with stripes in one of eight colours |
| images in a row | one; for `multimodal_simple` two, every third row lacks the second one |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.published_images import IMAGE, PATCH, scale_transforms, striped

Plain = dict[str, Any]

_MODELS: Final = ("llava", "multimodal_simple")
_COLOURS: Final = ("black", "red", "green", "yellow", "blue", "purple", "turquoise", "white")
_START: Final = 1
_FEATURES: Final = (IMAGE // PATCH) ** 2
_BEGIN, _HOLDER = 256, 0
_PADDED: Final = 4  # at the end of a row


def sees_images(section: Plain) -> bool:
    """Return whether a `model` or a dataloader is one of text with images."""
    return section.get("name") in _MODELS or "img_data_dir" in section


def fit_parts(model: Plain, length: float) -> None:
    """Make a model's parts, which are scaled, fit each other, in place.

    `length`: new length of rows over the old one.
    """
    text = model["text_model"]["hidden_size"]
    if "image_start_idx" in model:
        model["image_start_idx"] = max(_START, round(model["image_start_idx"] * length))
    if "image_model" in model:
        layers = (model.get("projector") or {}).get("image_model")
        _fit_layers(layers, model["image_model"]["hidden_size"], text)
        return
    section = model["image_model_list"]
    image = section["image_models"][0]["image_encoder"]["hidden_size"]
    _fit_layers(section.get("global_image_projection"), image, text)


def _fit_layers(layers: Plain | None, image: int, text: int) -> None:
    if layers:
        layers["input_unit"] = image
        layers["layers_units"] = [text] * len(layers["layers_units"])


def scale_loader(loader: Plain, folder: Path) -> None:
    """Scale a dataloader in place; its images will lie in `folder`."""
    channels, height, width = loader["image_data_size"]
    loader["image_data_size"] = [channels, IMAGE, IMAGE]
    loader["img_data_dir"] = str(folder / "images")
    scale_transforms(loader["transforms"], (height, width))


def write_captions(loader: Plain, num: int, length: int) -> None:
    """Write the images and `num` rows of a scaled dataloader."""
    import h5py
    from PIL import Image

    folder, images = Path(loader["data_dir"]), Path(loader["img_data_dir"])
    images.mkdir(parents=True)
    draw = np.random.default_rng(1)
    is_simple = "Simple" in loader["data_processor"]
    per_row = 2 if is_simple else 1
    rows = np.zeros((num, 5 if is_simple else 4, length), np.int32)
    places = np.full((num, per_row, _FEATURES), length, np.int32)
    names = np.full((num, per_row), "None", object)
    for number in range(num):
        shown = 1 if is_simple and number % 3 == 0 else per_row
        labels = [(number + idx) % len(_COLOURS) for idx in range(shown)]
        for idx, label in enumerate(labels):
            names[number, idx] = f"{number:05}_{idx}.png"
            Image.fromarray(striped(label, draw)).save(images / names[number, idx])
            first = _START + idx * _FEATURES
            places[number, idx] = np.arange(first, first + _FEATURES)
        caption = " and ".join(_COLOURS[one] for one in labels)
        _fill(rows[number], shown, f"stripes in {caption}, with noise. ")
    with h5py.File(folder / "data.h5", "w") as file:
        file["data"] = rows
        file.create_dataset("img_path", data=names, dtype=h5py.string_dtype())
        if is_simple:
            file["img_data_loc"] = places
        file.attrs["n_examples"] = num


def _fill(row: Any, num_images: int, caption: str) -> None:
    """Fill features (4 or 5, T): a begin, placeholders, the caption repeated, padding."""
    length = row.shape[1]
    text, end = _START + num_images * _FEATURES, length - _PADDED
    spoken = np.frombuffer((caption * length).encode(), np.uint8)
    ids = np.full(length + 1, _HOLDER, np.int32)
    ids[0] = _BEGIN
    ids[text : end + 1] = spoken[: end + 1 - text]
    row[0], row[2] = ids[:-1], ids[1:]
    row[0, end:] = row[2, end:] = _HOLDER
    row[1, text:end] = 1
    row[3, end:] = 1
    if len(row) > 4:
        row[4, _START:text] = 1
