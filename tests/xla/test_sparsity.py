"""Sparse runs on an XLA device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer import checkpointing

Run = Callable[..., Any]

ALGORITHMS: dict[str, dict[str, Any]] = {
    "rigl": {"algorithm": "rigl", "sparsity": 0.75, "update": {"freq": 2}},
    "gmp": {"algorithm": "gmp", "sparsity": {"type": "cubic", "final": 0.75, "steps": 8}},
}


def losses_of(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_masks_are_those_of_the_host_and_nobody_is_warned(
    run: Run, params: dict[str, Any], tmp_path: Path, name: str
) -> None:
    params["trainer"]["init"]["model"]["dropout"] = 0.0
    params["trainer"]["init"]["sparsity"] = ALGORITHMS[name]
    states, losses = {}, {}
    for device in ("cpu", "xla"):
        folder = tmp_path / device
        done = run(params, "--device", device, "--model_dir", str(folder))
        assert done.returncode == 0, done.stderr
        states[device] = checkpointing.load(folder / "checkpoint_12")
        losses[device] = losses_of(folder)
        assert "WARNING" not in done.stderr
    assert len(losses["xla"]) == 12
    assert losses["xla"] == pytest.approx(losses["cpu"], rel=1e-3)
    for device, state in states.items():
        for key, mask in state["sparsity"]["masks"].items():
            assert (~mask).sum() == round(0.75 * mask.numel()), device
            assert (state["model"][key][~mask] == 0).all()
    own, host = (states[device]["sparsity"]["masks"] for device in ("xla", "cpu"))
    same = [(own[key] == host[key]).float().mean().item() for key in host]
    assert min(same) > 0.99  # gradients differ in their last bits
