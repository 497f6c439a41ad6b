"""Running statistics, of which each process has others, are the first one's where they count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.checkpointing import load
from tests.distributed.ranks import run_ranks


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)

    def forward(self, batch: tuple[Tensor]) -> Tensor:
        return self.head(self.norm(batch[0])).square().mean()


def fit(rank: int, folder: Path, backend: Any, max_steps: int) -> dict[str, Any]:
    trainer = Trainer(
        device="cpu",
        backend=backend,
        model_dir=folder,
        model=Normed,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(max_steps=max_steps, num_epochs=9),
        checkpoint=Checkpoint(steps=2),
        seed=1,
    )
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(2)))
    trainer.fit(DataLoader(data, batch_size=3), DataLoader(data, batch_size=3))
    return {
        "mean": trainer.model.norm.running_mean.tolist(),
        "head": trainer.backend.host_state(trainer.model.head.weight).tolist(),
    }


@pytest.mark.slow_cases("DDP", "backend1")
@pytest.mark.parametrize(
    "backend",
    [pytest.param({}, id="DDP", marks=pytest.mark.slow), pytest.param({"parallel": {"shard": 2}})],
)
def test_a_run_goes_on_with_those_of_the_first_process(tmp_path, backend) -> None:
    whole = run_ranks(2, fit, tmp_path / "whole", backend, 6)
    parts = run_ranks(2, fit, tmp_path / "parts", backend, 4)
    saved = load(tmp_path / "parts" / "checkpoint_4")["model"]["norm.running_mean"]
    assert saved.tolist() == parts[0]["mean"]
    rest = run_ranks(2, fit, tmp_path / "parts", backend, 6)
    assert rest[0] == whole[0]
    assert rest[0]["mean"] == rest[1]["mean"]  # all of them have validated with it
