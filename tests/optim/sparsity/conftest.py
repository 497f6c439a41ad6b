"""A small model, its data, and trainers for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer import Logging, Trainer, TrainingLoop
from tests.doubles import History

Make = Callable[..., Trainer]


class Net(nn.Module):
    """Two layers with 96 and 12 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 12)
        self.head = nn.Linear(12, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return ((self.head(torch.tanh(self.body(inputs))) - targets) ** 2).mean()


@pytest.fixture
def net() -> type[nn.Module]:
    return Net


@pytest.fixture
def history() -> History:
    return History()


@pytest.fixture
def batches() -> list[tuple[Tensor, Tensor]]:
    """Ten batches of eight samples."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 8, generator=generator), torch.randn(8, 1, generator=generator))
        for _ in range(10)
    ]


@pytest.fixture
def make(tmp_path: Path, history: History) -> Iterator[Make]:
    """A function that builds a trainer with a given sparsity; `history` gets all metrics."""
    made: list[Trainer] = []

    def trainer(sparsity: Any, *callbacks: Any, **settings: Any) -> Trainer:
        arguments: dict[str, Any] = {
            "device": "cpu",
            "model_dir": tmp_path / "run",
            "model": Net,
            "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
            "sparsity": sparsity,
            "loop": TrainingLoop(max_steps=settings.pop("max_steps", 6)),
            "logging": Logging(log_steps=1),
            "callbacks": callbacks,
            "loggers": history,
            "seed": 0,
        }
        made.append(Trainer(**(arguments | settings)))
        return made[-1]

    yield trainer
    for each in made:
        each.close()
