"""Parameters that are unfrozen, replaced or added after the model was distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer import Callback, Trainer, TrainingLoop
from tests.distributed.ranks import run_ranks


class HeadOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 1)

    def forward(self, batch: tuple[Tensor]) -> Tensor:
        return self.head(self.body(batch[0])).square().mean()


class Change(Callback):
    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        model: Any = trainer.model
        if epoch == 1 and self.what == "unfrozen":
            model.body.requires_grad_(True)
        elif epoch == 1:
            model.head.bias = nn.Parameter(torch.ones(1))
            trainer.optimizer.add_param_group({"params": [model.head.bias]})


def fit(rank: int, folder: Path, what: str) -> str:
    trainer = Trainer(
        device="cpu",
        model_dir=folder,
        model=HeadOnly,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(num_epochs=3),
        callbacks=Change(what),
        seed=1,
    )
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(2)))
    try:
        trainer.fit(DataLoader(data, batch_size=3))
    except RuntimeError as error:
        return f"{type(error).__name__} at {trainer.global_step}: {error}"
    return f"ended at {trainer.global_step}"


@pytest.mark.slow
@pytest.mark.parametrize(("what", "name"), [("unfrozen", "body.weight"), ("new", "head.bias")])
def test_a_gradient_that_is_not_averaged_ends_the_run_on_all_processes(
    tmp_path: Path, what: str, name: str
) -> None:
    found = run_ranks(2, fit, tmp_path, what)
    error = f"BackendError: The gradient of {name} is not averaged"
    own, heard = error.replace(":", " at 4:", 1), "RunFailed at 4: another process failed. process "
    assert any(text.startswith(own) for text in found)
    # The second to come there may hear of the first before it looks at its own gradients.
    assert all(text.startswith(own) or (text.startswith(heard) and error in text) for text in found)
