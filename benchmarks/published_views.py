"""Published models of several views of images (DINO), scaled down.

The rule, besides those of `published_scaling.py` and `published_images.py`:

| setting | becomes |
|---|---|
| sizes of global and local images | 32 and 16 pixels, patches of 8 |
| widths of heads | 64, bottlenecks 16, 32 prototypes |
| data | as for images with classes |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

Plain = dict[str, Any]

_GLOBAL: Final = 32
_LOCAL: Final = 16
_PATCH: Final = 8
_HEAD: Final = {"hidden_size": 64, "bottleneck_size": 16, "output_size": 32}


def has_views(section: Plain) -> bool:
    """Return whether a `model` or a dataloader is one of several views of images."""
    return (
        section.get("name") == "dino" or section.get("data_processor") == "DinoImageDataProcessor"
    )


def scale_parts(model: Plain, scale_trunk: Callable[[Plain], Any]) -> None:
    """Scale the parts of a model in place; `scale_trunk` scales widths and layers of a trunk."""
    for part in model["image_model_trunks"]:
        trunk = part["image_model"]
        scale_trunk(trunk)
        trunk["image_size"], trunk["patch_size"] = [_GLOBAL] * 2, [_PATCH] * 2
        trunk["interpolate_position_embedding"]["local_patch_dims"] = [_LOCAL // _PATCH] * 2
    for part in model["heads"]:
        part["head_model"] |= {**_HEAD, "input_size": trunk["hidden_size"]}
    for part in model["losses"]:
        part["loss"]["input_size"] = _HEAD["output_size"]


def scale_views(loader: Plain, folder: Path) -> None:
    """Scale sizes of views in place; the data will be in a new folder."""
    loader["dataset"]["root"] = str(folder)
    crops = loader["ssl_transform"]["multi_crop_transform"]
    crops |= {"global_image_size": _GLOBAL, "local_image_size": _LOCAL}
    masks = loader["ssl_transform"]["masked_patch_transform"]
    masks |= {"image_size": _GLOBAL, "patch_size": _PATCH}
