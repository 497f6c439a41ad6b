"""Sparse runs on an XLA device."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer import Checkpoint, Logging, Trainer, TrainingLoop, checkpointing
from modelzoo_trainer.core import MixedPrecision
from tests.doubles import History

NUM_STEPS: Final = 12
ALGORITHMS: Final[dict[str, dict[str, Any]]] = {
    "rigl": {"algorithm": "rigl", "sparsity": 0.75, "update": {"freq": 2}},
    "gmp": {"algorithm": "gmp", "sparsity": {"type": "cubic", "final": 0.75, "steps": 8}},
}


class Classifier(nn.Module):
    """Two layers, whose weights are of 2048 and 320 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)


def data(num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    inputs = [torch.randn(32, 64, generator=generator) for _ in range(num)]
    return [(each, each[:, :10].argmax(1)) for each in inputs]


def losses_of(folder: Path, name: str, device: str) -> list[tuple[int, float]]:
    """Train, with accumulation, and clipping between the two uses of the masks."""
    history = History()
    with Trainer(
        device=device,
        model_dir=folder,
        model=Classifier,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        precision=MixedPrecision(enabled=False, max_gradient_norm=1.0),
        loop=TrainingLoop(max_steps=NUM_STEPS, grad_accum_steps=2),
        checkpoint=Checkpoint(steps=NUM_STEPS),
        logging=Logging(log_steps=1),
        sparsity=ALGORITHMS[name],
        loggers=history,
        seed=1,
    ) as trainer:
        trainer.fit(data(2 * NUM_STEPS))
    return history.of("loss")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_masks_are_those_of_the_host_and_nobody_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    states, losses = {}, {}
    for device in ("cpu", "xla"):
        losses[device] = losses_of(tmp_path / device, name, device)
        states[device] = checkpointing.load(tmp_path / device / f"checkpoint_{NUM_STEPS}")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [step for step, _ in losses["xla"]] == list(range(1, NUM_STEPS + 1))
    assert dict(losses["xla"]) == pytest.approx(dict(losses["cpu"]), rel=1e-3)
    for device, state in states.items():
        for key, mask in state["sparsity"]["masks"].items():
            assert (~mask).sum() == round(0.75 * mask.numel()), device
            assert (state["model"][key][~mask] == 0).all()
    own, host = (states[device]["sparsity"]["masks"] for device in ("xla", "cpu"))
    same = [(own[key] == host[key]).float().mean().item() for key in host]
    assert len(same) == 2
    assert min(same) > 0.99  # gradients differ in their last bits
