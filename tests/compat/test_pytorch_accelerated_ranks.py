"""What pytorch-accelerated does in several processes, in our spelling: PA-37 to PA-49."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from modelzoo_trainer import Callback, Checkpoint
from modelzoo_trainer.tools.report.run_history import RunHistory
from tests.distributed.ranks import run_ranks
from tests.doubles import History, Scale, make_trainer

pytestmark = pytest.mark.slow


class Tokens(nn.Module):
    """Its loss is a mean over the tokens that count: those above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        num = (batch > 0).sum()
        return {"loss": self.weight * batch.sum() / num.clamp_min(1), "num_items": num}


def loader(*values: float, size: int = 2) -> Any:
    return DataLoader(torch.tensor(values, dtype=torch.float32), batch_size=size)


def _run(folder: Path, model: Any, train: Any, val: Any) -> dict[str, Any]:
    history = History()
    with make_trainer(folder, RunHistory(), model=model, loggers=history) as trainer:
        trainer.fit(train, val)
        return {
            "weight": trainer.model.weight.item(),
            "loss": history.of("loss"),
            "val": history.of("validate_0/loss"),
            "epoch": history.of("train_loss_epoch"),
        }


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_boundary(self, trainer):
        if trainer.global_step == self.step:
            trainer.early_exit.stop("the test says so")


def _resumed(folder: Path, train: Any) -> Any:
    """Return the loss of an epoch that was cut after its first step."""
    history = History()
    for callbacks in ([RunHistory(), StopAt(1)], [RunHistory()]):
        settings = {"model": Scale, "loggers": history, "checkpoint": Checkpoint(steps=1)}
        with make_trainer(folder, *callbacks, **settings) as trainer:
            trainer.fit(train)
    return history.of("train_loss_epoch")


def _everything(rank: int, folder: Path) -> dict[str, Any]:
    samples, single = loader(1, 2, 3, 4, 5), loader(7)
    found = {
        "samples": _run(folder / "samples", Scale, samples, loader(1, 2, 3, 4, 5)),
        "tokens": _run(folder / "tokens", Tokens, loader(1, 2, 1, 0, 4, 0, 0, 0, size=4), single),
    }
    found["resumed"] = _resumed(folder / "resumed", samples)
    with make_trainer(folder / "last", model=Scale) as trainer:
        backend = trainer.backend
        found["gathered"] = [
            part.tolist() for part in backend.gather_object(torch.arange(2 + 3 * rank))
        ]
        found["is_main"] = backend.is_main
        if backend.is_main:
            (folder / "written").touch()
        backend.barrier("written")
        found["is_there"] = (folder / "written").exists()
        found["told"] = backend.broadcast_object(f"by {rank}")
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    """What each of two processes has found."""
    return run_ranks(2, _everything, tmp_path_factory.mktemp("ranks"))


def test_pa_37_losses_are_averaged_over_processes(found) -> None:
    for one in found:
        assert one["samples"]["weight"] == pytest.approx(1 - 0.1 * 2.5 - 0.1 * 5)
    first = found[0]["samples"]
    assert first["loss"] == [(1, pytest.approx(2.5)), (2, pytest.approx(5 * 0.75))]
    assert first["val"] == [(2, pytest.approx(3 * 0.25))]
    assert first["epoch"] == [(2, pytest.approx((4 * 2.5 + 5 * 0.75) / 5))]
    assert found[0]["resumed"] == first["epoch"]


def test_pa_39_tokens_count_alike_in_all_processes(found) -> None:
    assert [one["tokens"]["weight"] for one in found] == pytest.approx([0.8, 0.8])
    assert found[0]["tokens"]["loss"] == [(1, pytest.approx(2.0))]


def test_pa_47_less_data_than_processes(found) -> None:
    assert found[0]["tokens"]["val"] == [(1, pytest.approx(7 * 0.8))]


def test_pa_48_gathering_needs_no_padding(found) -> None:
    assert [one["gathered"] for one in found] == [[[0, 1], [0, 1, 2, 3, 4]]] * 2


def test_pa_49_the_first_process_alone_or_first(found) -> None:
    assert [one["is_main"] for one in found] == [True, False]
    assert [one["is_there"] for one in found] == [True, True]
    assert [one["told"] for one in found] == ["by 0", "by 0"]
