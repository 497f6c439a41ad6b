"""Settings of the data of DINO for the tests."""

from __future__ import annotations

import json
from typing import Any, Final

_CROPS: Final[dict[str, Any]] = {
    "global_num_crops": 2,
    "local_num_crops": 3,
    "global_image_size": 8,
    "local_image_size": 4,
    "global_crops_scale": [0.32, 1],
    "local_crops_scale": [0.05, 0.32],
    "multicrop_transform_list": [
        {"name": "random_horizontal_flip", "p": 0.5},
        {
            "name": "color_jitter_with_prob",
            "brightness": 0.4,
            "contrast": 0.4,
            "saturation": 0.2,
            "hue": 0.1,
            "p": 0.8,
        },
        {"name": "random_gray_scale", "p": 0.2},
        {
            "name": "random_gaussian_blur_random_radius",
            "p": [1.0, 0.1, 0.5, 0.5, 0.5],
            "radius_min": 0.1,
            "radius_max": 2.0,
        },
        {"name": "random_solarize", "threshold": 128, "p": [0.0, 0.2, 0.0, 0.0, 0.0]},
        {"name": "to_tensor"},
        {"name": "normalize", "mean": [0.5, 0.4, 0.3], "std": [0.5, 0.2, 0.1]},
    ],
}
_MASKS: Final[dict[str, Any]] = {
    "image_size": 8,
    "patch_size": 2,
    "mask_probability": 0.5,
    "mask_ratio_tuple": [0.1, 0.5],
}


def arguments(root: str, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a processor, which share nothing."""
    found: dict[str, Any] = {
        "dataset": {"name": "Imagenet", "root": root, "split": "train"},
        "ssl_transform": {
            "name": "Dinov2Transform",
            "multi_crop_transform": _CROPS,
            "masked_patch_transform": _MASKS,
        },
        "batch_size": 4,
        "shuffle": True,
        "shuffle_seed": 5,
    }
    copied: dict[str, Any] = json.loads(json.dumps({**found, **changes}))
    return copied
