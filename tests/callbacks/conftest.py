"""A small model, data and a trainer for tests of callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer import Logging, Trainer, TrainingLoop
from tests.callback_makers import Net
from tests.doubles import History

Make = Callable[..., Trainer]


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
        (torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator))
        for _ in range(10)
    ]


@pytest.fixture
def make(tmp_path: Path, history: History) -> Iterator[Make]:
    """A function that builds a trainer; its `history` gets all metrics."""
    made: list[Trainer] = []

    def trainer(*callbacks: Any, **settings: Any) -> Trainer:
        arguments: dict[str, Any] = {
            "device": "cpu",
            "model_dir": tmp_path / "run",
            "model": Net,
            "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            "loop": TrainingLoop(max_steps=settings.pop("max_steps", 4)),
            "logging": Logging(log_steps=settings.pop("log_steps", 1)),
            "callbacks": callbacks,
            "loggers": history,
            "seed": 0,
        }
        made.append(Trainer(**(arguments | settings)))
        return made[-1]

    yield trainer
    for each in made:
        each.close()
