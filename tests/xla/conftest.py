"""Runs on torch_xla: where it is installed and PJRT_DEVICE says on what."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.xla_here import HAS_XLA, WHY_NOT

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.xla)
            if not HAS_XLA:
                item.add_marker(pytest.mark.skip(reason=WHY_NOT))


@pytest.fixture
def params() -> dict[str, Any]:
    """A small run of 12 steps: dropout, clipping, a warm-up, accumulation, checkpoints."""
    data = {"data_processor": "DigitsProcessor", "batch_size": 32}
    lr = {"initial_learning_rate": 0.0, "end_learning_rate": 0.01, "total_iters": 6}
    model = {
        "name": "fc_mnist",
        "hidden_sizes": [32],
        "input_size": 64,
        "activation_fn": "relu",
        "dropout": 0.2,
    }
    init = {
        "seed": 1,
        "device": "xla",
        "model": model,
        "optimizer": {"AdamW": {"weight_decay": 0.1}},
        "schedulers": [{"LinearLR": lr}],
        "precision": {"enabled": False, "max_gradient_norm": 1.0},
        "loop": {"max_steps": 12, "grad_accum_steps": 2, "eval_steps": 2},
        "checkpoint": {"steps": 4},
        "logging": {"log_steps": 1},
    }
    fit = {
        "train_dataloader": data | {"split": "train", "drop_last": True},
        "val_dataloader": data | {"split": "val", "shuffle": False},
    }
    return {"trainer": {"init": init, "fit": fit}}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A function that runs parameters by the command line, and returns the finished process."""

    def start(params: dict[str, Any], *args: str, **environment: str) -> Any:
        path = tmp_path / "params.yaml"
        path.write_text(yaml.safe_dump(params), encoding="utf-8")
        return subprocess.run(
            [sys.executable, "run.py", "--params", str(path), *args],
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return start
