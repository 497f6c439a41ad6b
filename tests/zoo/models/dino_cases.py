"""Small models of a student and a teacher for the tests."""

from __future__ import annotations

import json
from typing import Any, Final

import torch
from torch import Tensor

from modelzoo_trainer.zoo.models.vision.dino.model import Dino

WIDTH, PROTOTYPES = 16, 12
TRUNK: Final[dict[str, Any]] = {
    "name": "MultiImageViTModel",
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "filter_size": 32,
    "image_size": [8, 8],
    "patch_size": [2, 2],
    "dropout_rate": 0.0,
    "layerscale_value": 0.5,
    "use_masked_patches": True,
    "interpolate_position_embedding": {"local_patch_dims": [2, 2]},
}
HEAD: Final[dict[str, Any]] = {
    "name": "DinoHead",
    "input_size": WIDTH,
    "hidden_size": 24,
    "bottleneck_size": 8,
    "output_size": PROTOTYPES,
    "norm_last_layer": False,
}
LOSS: Final[dict[str, Any]] = {
    "input_size": PROTOTYPES,
    "warmup_teacher_temp": 0.04,
    "teacher_temp": 0.07,
    "warmup_teacher_temp_steps": 4,
    "total_steps": 10,
    "student_temp": 0.1,
    "center_momentum": 0.9,
    "teacher_temp_scheduler": "linear_cosine",
}
DECAY: Final = {"ema_decay_start": 0.9, "ema_decay_end": 1.0, "total_steps": 10}


def average(kind: str) -> dict[str, Any]:
    """Return the setting of the teacher of a list of parts."""
    return {
        "source": f"{kind}.model(1)",
        "target": f"{kind}.model(0)",
        "scheduler_name": "cosine",
        "scheduler_params": dict(DECAY),
    }


def settings() -> dict[str, Any]:
    """Return the settings of a model with one head for both losses, as a published one."""
    found: dict[str, Any] = {
        "image_model_trunks": [
            {
                "image_model": TRUNK,
                "forward_args": [["ssl_transform.output('global_view')", None, None]],
                "stop_grad": True,
            },
            {
                "image_model": TRUNK,
                "forward_args": [
                    [
                        "ssl_transform.output('global_view')",
                        None,
                        "ssl_transform.output('collated_masks')",
                    ],
                    ["ssl_transform.output('local_view')", None, None],
                ],
                "stop_grad": False,
            },
        ],
        "heads": [
            {
                "head_model": HEAD,
                "forward_args": [
                    ["image_model_trunks.output(0,0,1)"],
                    ["image_model_trunks.output(0,0,0)"],
                ],
                "stop_grad": True,
            },
            {
                "head_model": HEAD,
                "forward_args": [
                    ["image_model_trunks.output(1,0,1)"],
                    ["image_model_trunks.output(1,1,1)"],
                    ["image_model_trunks.output(1,0,0)"],
                ],
            },
        ],
        "losses": [
            {
                "loss": {"name": "DinoDistillationLoss", **LOSS},
                "forward_args": [
                    ["heads.output(1,0,0)", "heads.output(0,0,0)", "heads.output(1,1,0)"]
                ],
            },
            {
                "loss": {"name": "iBOTPatchLoss", **LOSS},
                "forward_args": [
                    [
                        "heads.output(0,1,0)",
                        "heads.output(1,2,0)",
                        "ssl_transform.output('collated_masks')",
                    ]
                ],
            },
        ],
        "copy_init_weights": [
            {"source": f"{kind}.model(0)", "target": f"{kind}.model(1)"}
            for kind in ("image_model_trunks", "heads")
        ],
        "ema": [average("image_model_trunks"), average("heads")],
        "freeze": ["image_model_trunks.model.0.*", "heads.model.0.*"],
    }
    copied: dict[str, Any] = json.loads(json.dumps(found))  # nothing is shared
    return copied


def make(seed: int = 1, trunk: dict[str, Any] | None = None, **changes: Any) -> Dino:
    """Return a model; `trunk`: changes to the settings of both trunks."""
    given = settings()
    for part in given["image_model_trunks"]:
        part["image_model"] |= trunk or {}
    torch.manual_seed(seed)
    return Dino(**{**given, **changes})


def batch_of(size: int = 4, seed: int = 2) -> dict[str, Tensor]:
    """Return two global and three local views of each sample, and masks."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "global_view": torch.randn(size, 2, 3, 8, 8, generator=generator),
        "local_view": torch.randn(size, 3, 3, 4, 4, generator=generator),
        "collated_masks": torch.rand(size, 2, 16, generator=generator) < 0.3,
        "labels": torch.zeros(size, dtype=torch.int32),
    }
