"""Masks with several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer import Trainer, TrainingLoop
from modelzoo_trainer.core.sparsity import Sparsity
from modelzoo_trainer.errors import ConfigError
from tests.distributed.ranks import run_ranks

RIGL = {"algorithm": "rigl", "sparsity": 0.5, "update": {"freq": 2}}
SET = {"algorithm": "set", "sparsity": 0.5, "update": {"freq": 2}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, batch: tuple[Tensor]) -> Tensor:
        return self.head(torch.tanh(self.body(batch[0]))).square().mean()


def trainer_of(folder: Path, sparsity: Any, backend: Any) -> Trainer:
    return Trainer(
        device="cpu",
        backend=backend,
        model_dir=folder,
        model=Net,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
        sparsity=sparsity,
        loop=TrainingLoop(max_steps=6, num_epochs=9),
        seed=1,
    )


def fit(rank: int, folder: Path, sparsity: Any, batch_size: int) -> dict[str, Any]:
    trainer = trainer_of(folder, sparsity, {})
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(2)))
    trainer.fit(DataLoader(data, batch_size=batch_size))
    sparsity = trainer.get_callback(Sparsity)
    return {one.name: one.pruned.tolist() for one in sparsity.params} | {
        "weight": trainer.model.body.weight.tolist()
    }


def refuse(rank: int, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        trainer_of(folder, 0.5, {"parallel": {"shard": 2}})
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", [RIGL, SET], ids=["rigl", "set"])
def test_all_processes_have_the_same_masks_as_one(tmp_path, sparsity) -> None:
    one, other = run_ranks(2, fit, tmp_path / "two", sparsity, 2)
    assert one == other
    (alone,) = run_ranks(1, fit, tmp_path / "one", sparsity, 4)
    assert alone["body.weight"] == one["body.weight"]
    assert alone["head.weight"] == one["head.weight"]


@pytest.mark.slow
def test_a_process_that_holds_a_part_of_the_weights_refuses(tmp_path) -> None:
    for said in run_ranks(2, refuse, tmp_path):
        assert said.startswith("sparsity does not work with sharded weights")
