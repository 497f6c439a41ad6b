"""A small run to see loggers in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer import Logging, Trainer, TrainingLoop

Make = Callable[..., Trainer]


class Net(nn.Module):
    """Two layers and a head; `accuracy` is the share of positive outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        hidden, target = batch
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        scores = self.head(hidden)
        loss = ((scores - target) ** 2).mean()
        return {"loss": loss, "scores": scores, "accuracy": (target > 0).float().mean()}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def batches() -> list[tuple[Tensor, Tensor]]:
    """Ten batches of eight samples."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator))
        for _ in range(10)
    ]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A function that builds a trainer with some loggers."""
    made: list[Trainer] = []

    def trainer(*loggers: Any, **settings: Any) -> Trainer:
        arguments: dict[str, Any] = {
            "device": "cpu",
            "model_dir": tmp_path / "run",
            "model": Net,
            "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            "loop": TrainingLoop(max_steps=settings.pop("max_steps", 4)),
            "logging": Logging(log_steps=settings.pop("log_steps", 1)),
            "loggers": loggers,
            "seed": 0,
        }
        made.append(Trainer(**(arguments | settings)))
        return made[-1]

    yield trainer
    for each in made:
        each.close()
