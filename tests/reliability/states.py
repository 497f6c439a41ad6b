"""States that are saved, and folders of checkpoints, without a trainer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from modelzoo_trainer import checkpointing
from modelzoo_trainer.errors import CheckpointError

NAMES = re.compile(r"checkpoint_\d+")


def state_of(step: int, numbers: int = 40) -> dict[str, Any]:
    """Return a state like that of a run, which is another one at every step."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(numbers, generator=generator)
    return {
        "model": {"weight": weight, "bias": weight[:3].double(), "count": torch.tensor(step)},
        "optimizer": {"state": {0: {"exp_avg": weight * 2}}, "param_groups": [{"lr": 0.1 / step}]},
        "global_step": step,
        "rng": {"python": (3, tuple(range(step, step + 5)), None)},
        "callbacks": {"Ema": {"average": weight / 3, "text": "x" * step}},
    }


def make(folder: Path, *steps: int, numbers: int = 40) -> list[Path]:
    """Write checkpoints and return their paths."""
    paths = [folder / f"checkpoint_{step}" for step in steps]
    for path, step in zip(paths, steps, strict=True):
        checkpointing.save(path, state_of(step, numbers), step=step)
    return paths


def is_equal(first: Any, second: Any) -> bool:
    """Return whether two states are the same, bit by bit."""
    if isinstance(first, torch.Tensor):
        return (
            isinstance(second, torch.Tensor)
            and first.dtype == second.dtype
            and (torch.equal(first, second))
        )
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            is_equal(value, second[key]) for key, value in first.items()
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(is_equal, first, second))
    return bool(first == second)


def loads(path: Path, numbers: int = 40) -> bool:
    """Return whether a checkpoint loads; if so, it must be what was saved under its name."""
    try:
        loaded = checkpointing.load(path)
    except CheckpointError:
        return False
    step = int(path.name.split("_")[1])
    assert is_equal(loaded, state_of(step, numbers)), f"{path} loads, but is something else"
    return True


def visible(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, as a run sees them."""
    return [info.path for info in checkpointing.list_checkpoints(folder)]


def newest_intact(folder: Path) -> Path | None:
    """Return the newest checkpoint that loads."""
    return next((path for path in reversed(visible(folder)) if loads(path)), None)


def leftovers(folder: Path) -> list[str]:
    """Return what is left of checkpoints that were being written or deleted."""
    return sorted(p.name for p in folder.iterdir() if p.name.startswith((".tmp-", ".trash-")))
