"""Gradients of micro-batches that are reduced one by one, and added up as shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from modelzoo_trainer import Callback, Trainer, TrainingLoop
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.slow


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        states = batch["x"]
        for layer in self.layers:
            states = layer(states).tanh()
        return states.square().mean()


class Sizes(Callback):
    """Note how many elements of gradients a process has after each micro-batch."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes

    @override
    def on_after_backward(self, trainer: Any, model: Any, outputs: Any) -> None:
        grads = [param.grad for param in model.parameters()]
        self._sizes.append(sum(0 if one is None else one.to_local().numel() for one in grads))


def train(rank: int, folder: Path, accumulates: bool) -> tuple[list[Any], int]:
    """Return the weights after three steps of three batches, and the elements of a gradient."""
    sizes: list[int] = []
    sharding = {"accumulate_shards": accumulates}
    trainer = Trainer(
        model=Model,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        loop=TrainingLoop(max_steps=3, grad_accum_steps=3),
        device="cpu",
        backend={"parallel": {"shard": -1}, "sharding": sharding},
        model_dir=folder,
        progress="none",
    )
    with trainer:
        model: Any = trainer.model

        batches = [
            {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank + number))}
            for number in range(9)
        ]
        trainer.add_callback(Sizes(sizes))
        trainer.fit(batches)
        weights = [param.full_tensor().tolist() for param in model.parameters()]
    return weights, sizes[0]


@pytest.mark.ranks(2)
def test_sums_of_shards_are_the_gradients_that_are_reduced_once(tmp_path: Path) -> None:
    plain, sharded = (run_ranks(2, train, tmp_path / str(one), one) for one in (False, True))
    for (before, early), (after, reduced) in zip(plain, sharded, strict=True):
        for one, other in zip(before, after, strict=True):
            torch.testing.assert_close(torch.tensor(other), torch.tensor(one))
        assert early == 0  # nothing is reduced yet
        assert reduced == 3 * (8 * 8 + 8) // 2
