"""Several optimizers in several processes: each steps with the mean gradient of all samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer import Checkpoint, ConfigError, TrainingLoop
from tests.core.test_several_optimizers import Adversaries, make
from tests.distributed.ranks import run_ranks
from tests.doubles import History

pytestmark = pytest.mark.slow


class Through(Adversaries):
    """Calls the model as a whole too, which several processes have wrapped."""

    def training_step(self, batch):
        (batch,) = batch
        self.manual_backward(self.forward(batch)["loss"])
        self.optimizer_step("critic")
        self.optimizer_zero_grad("critic")
        return super().training_step(batch)


class Plain(Adversaries):
    def training_step(self, batch):
        return super().training_step(batch[0])


KINDS = {"through": Through, "plain": Plain}


def loader(num: int, batch_size: int) -> Any:
    data = torch.randn(num, 3, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(data), batch_size=batch_size)


def train(rank: int, folder: Path, kind: str, batch_size: int, steps: int = 5) -> Any:
    history = History()
    with make(
        folder,
        kind=KINDS[kind],
        loop=TrainingLoop(max_steps=steps),
        checkpoint=Checkpoint(steps=3),
        loggers=history,
    ) as trainer:
        trainer.fit(loader(18, batch_size))
        weights = {name: value.tolist() for name, value in trainer.model.state_dict().items()}
    return weights, history.of("loss")


def is_close(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(
        torch.allclose(torch.tensor(first[name]), torch.tensor(second[name]), atol=1e-6)
        for name in second
    )


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_compute_what_one_does(tmp_path, kind) -> None:
    # The fifth batch has 2 samples: one process has 2, the other a padding batch.
    alone, losses = train(0, tmp_path / "one", kind, 4)
    (first, own_losses), (second, _) = run_ranks(2, train, tmp_path / "two", kind, 2)
    assert first == second
    assert is_close(first, alone)
    assert [step for step, _ in own_losses] == [step for step, _ in losses]
    assert [value for _, value in own_losses] == pytest.approx([value for _, value in losses])


def train_twice(rank: int, folder: Path) -> bool:
    whole = train(rank, folder / "whole", "plain", 2)[0]
    train(rank, folder / "run", "plain", 2, steps=3)
    return train(rank, folder / "run", "plain", 2)[0] == whole


def test_two_processes_resume_exactly(tmp_path) -> None:
    assert run_ranks(2, train_twice, tmp_path) == [True, True]


def refused(rank: int, folder: Path) -> str:
    with make(folder, backend={"parallel": {"shard": -1}}) as trainer:
        try:
            trainer.fit(loader(18, 2))
        except ConfigError as error:
            return str(error)
    return ""


def test_a_model_that_is_divided_is_refused(tmp_path) -> None:
    assert all("several optimizers" in one for one in run_ranks(2, refused, tmp_path))
