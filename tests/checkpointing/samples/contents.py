"""The state in the stored samples: every kind of value that a state may hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

STEP = 7


def state() -> dict[str, Any]:
    """Return it; the same each time, without any random generator."""
    weight = torch.arange(12.0).reshape(3, 4) / 7
    return {
        "model": {
            "embed.weight": weight,
            "head.weight": weight,  # tied
            "head.bias": torch.tensor([-0.0, math.inf, math.nan]),
            "norm.weight": torch.linspace(-2, 2, 5).bfloat16(),
            "norm.scale": torch.tensor([0.5, -1.5]).to(torch.float8_e4m3fn),
            "steps": torch.tensor(3),
            "mask": torch.tensor([True, False, True]),
            "turned": torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
            "empty": torch.empty(0, 3),
            "waves": torch.tensor([1 + 2j, -3j]),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.full((3, 4), 1e-8)}},
            "param_groups": [
                {"lr": 1e-3, "betas": (0.9, 0.999), "params": [0], "fused": None, "amsgrad": False}
            ],
        },
        "grad_scaler": {},
        "global_step": STEP,
        "rng": {
            "numpy": {"key": np.arange(5, dtype=np.uint32) * 1000, "pos": np.int64(4)},
            "python": (3, (1, 2, 2**32 - 1), None),
            "device": torch.arange(16, dtype=torch.uint8),
        },
        "callbacks": {
            "Scores": {
                "best": math.inf,
                "history": [0.1, -0.0, math.nan, 5e-324],
                "big": -(2**100),
                "text": "caf\u00e9 \ud800 \x00",
                "raw": b"\x80\x04]q\x00.",
                "wide": np.float32(0.1),
                "array": np.arange(6.0).reshape(2, 3).T,
                "complex": np.array([1 + 2j]),
                "flag": np.bool_(True),
            },
            "__type__": "tensor",
            -5: {"nested": [(), [], {}, (1, [2, (3,)])]},
        },
    }
