"""Masks with several processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.core.sparsity import Sparsity
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


def trainer_of(folder: Path, sparsity: Any, backend: Any, steps: int = 6, **more: Any) -> Trainer:
    return Trainer(
        device="cpu",
        backend=backend,
        model_dir=folder,
        model=Net,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
        sparsity=sparsity,
        loop=TrainingLoop(max_steps=steps, num_epochs=9),
        seed=1,
        **more,
    )


def data_of(batch_size: int) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(2)))
    return DataLoader(data, batch_size=batch_size)


def fit(rank: int, folder: Path, sparsity: Any, batch_size: int) -> dict[str, Any]:
    trainer = trainer_of(folder, sparsity, {})
    trainer.fit(data_of(batch_size))
    sparsity = trainer.get_callback(Sparsity)
    return {one.name: one.pruned.tolist() for one in sparsity.params} | {
        "weight": trainer.model.body.weight.tolist()
    }


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", [RIGL, SET], ids=["rigl", "set"])
def test_all_processes_have_the_same_masks_as_one(tmp_path, sparsity) -> None:
    one, other = run_ranks(2, fit, tmp_path / "two", sparsity, 2)
    assert one == other
    (alone,) = run_ranks(1, fit, tmp_path / "one", sparsity, 4)
    assert alone["body.weight"] == one["body.weight"]
    assert alone["head.weight"] == one["head.weight"]


def train(
    rank: int, folder: Path, sparsity: Any, parallel: dict[str, int], batch_size: int, steps: int
) -> dict[str, Any]:
    """Train on whole or split weights, saving at the end, from where the folder's run ended."""
    backend: dict[str, Any] = {"parallel": parallel}
    if "tensor" in parallel:
        backend["tensor_plan"] = {"body": "colwise", "head": "rowwise"}
    trainer = trainer_of(folder, sparsity, backend, steps, checkpoint=Checkpoint(steps=2))
    trainer.fit(data_of(batch_size))
    whole = trainer.backend.comm.whole
    callback = trainer.get_callback(Sparsity)
    fractions = callback.fractions(steps)
    return {
        "masks": {one.name: whole(one.pruned).tolist() for one in callback.params},
        "weights": {
            name: whole(param.detach()) for name, param in trainer.model.named_parameters()
        },
        "fractions": {name: float(actual) for name, (_, actual) in fractions.items()},
    }


GROUPS = {"algorithm": "rigl", "sparsity": 0.5, "update": {"freq": 2}, "balance_in_groups": 2}
SPLIT = {
    "static": (0.5, {"shard": 2}),
    "rigl": (RIGL, {"shard": 2}),
    "groups": (GROUPS, {"shard": 2}),
    "set": (SET, {"shard": 2}),
    "tensor": (RIGL, {"tensor": 2}),
    "replicated": (RIGL, {"replicate": 2, "shard": 2}),
    "both": (SET, {"shard": 2, "tensor": 2}),
}


@pytest.mark.slow_cases("static", "tensor", every=3)
@pytest.mark.parametrize("case", SPLIT)
def test_split_weights_have_the_masks_of_whole_ones(tmp_path: Path, case: str) -> None:
    sparsity, parallel = SPLIT[case]
    (alone,) = run_ranks(1, train, tmp_path / "one", sparsity, {}, 8, 6)
    num = math.prod(parallel.values())
    num_shards = num // parallel.get("tensor", 1)
    ranks = run_ranks(num, train, tmp_path / "split", sparsity, parallel, 8 // num_shards, 6)
    for one in ranks:
        assert one["masks"] == alone["masks"]
        assert one["fractions"] == alone["fractions"]
        torch.testing.assert_close(one["weights"], alone["weights"], rtol=1e-5, atol=1e-6)
    assert alone["fractions"]["body.weight"] == 0.5


@pytest.mark.slow
def test_masks_are_resumed_with_another_number_of_processes(tmp_path: Path) -> None:
    (alone,) = run_ranks(1, train, tmp_path / "one", RIGL, {}, 8, 6)
    folder = tmp_path / "split"
    run_ranks(2, train, folder, RIGL, {"shard": 2}, 4, 2)
    run_ranks(1, train, folder, RIGL, {}, 8, 4)
    for one in run_ranks(2, train, folder, RIGL, {"shard": 2}, 4, 6):
        assert one["masks"] == alone["masks"]
        torch.testing.assert_close(one["weights"], alone["weights"], rtol=1e-5, atol=1e-6)
