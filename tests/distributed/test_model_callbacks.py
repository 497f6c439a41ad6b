"""Callbacks on the model's side in several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks.extra_checkpoint import ExtraCheckpoint
from modelzoo_trainer.callbacks.model_ema import ModelEma
from modelzoo_trainer.zoo.callbacks.lora import Lora
from modelzoo_trainer.zoo.callbacks.move_modules import ConvertSyncBatchNorm
from tests.distributed.perplexities import validate
from tests.distributed.ranks import run_ranks
from tests.distributed.training import WIDTH, Net, samples

pytestmark = pytest.mark.slow

ENGINES = {"replicated": None, "sharded": {"parallel": {"shard": -1}}}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, batch: Any) -> Any:
        return (self.head(torch.tanh(self.norm(batch[0]))) ** 2).mean()


def fit(rank: int, folder: Path, make: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Train for some steps of 4 samples each, and return the weights and those of the average."""
    options = dict(options)
    callbacks, model = make()
    size, steps = options.pop("batch_size", 2), options.pop("steps", 6)
    trainer = Trainer(
        device="cpu",
        backend=options.pop("backend", None),
        model_dir=folder,
        model=model,
        optimizer=lambda built: torch.optim.SGD(built.parameters(), lr=0.05),
        loop=TrainingLoop(max_steps=steps, eval_frequency=options.pop("eval_frequency", 1.0)),
        checkpoint=Checkpoint(steps=options.pop("save", None)),
        callbacks=callbacks,
        loggers=[],
        seed=1,
    )
    trainer.fit(DataLoader(samples(24), batch_size=size), DataLoader(samples(8), batch_size=size))
    whole = trainer.backend.host_state(dict(trainer.model.state_dict()))
    ema = trainer.get_callback(ModelEma)
    averages: dict[str, Any] = {}
    if ema is not None:
        averages = trainer.backend.host_state(ema.average.state_dict()["average"])
    trainer.close()
    return {
        "weights": {name: value.tolist() for name, value in whole.items()},
        "averages": {name: value.tolist() for name, value in averages.items()},
    }


def plain_net() -> nn.Module:
    return Net(None)


def averaging() -> Any:
    extra = ExtraCheckpoint(steps=6, file_format="safetensors", averaged=True, folder="average")
    return [ModelEma(0.7), extra, ExtraCheckpoint(steps=4, keep=1)], plain_net


def sharing() -> Any:
    return [ConvertSyncBatchNorm()], Normed


def adapting() -> Any:
    return [Lora({"r": 2, "merge_weights": True, "target_modules": ["Block"]})], plain_net


def close(first: dict[str, Any], second: dict[str, Any], rtol: float = 1e-9) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(
            torch.tensor(first[name]), torch.tensor(second[name]), rtol=rtol, atol=1e-12, msg=name
        )


# CI: sharded.
@pytest.mark.soak_cases("replicated")
@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_have_the_average_of_one(tmp_path, engine):
    options = {"backend": ENGINES[engine]}
    [alone] = run_ranks(1, fit, tmp_path / "alone", averaging, {"batch_size": 4})
    both = run_ranks(2, fit, tmp_path / "both", averaging, options)
    for found in both:
        close(found["weights"], alone["weights"])
        close(found["averages"], alone["averages"])
    assert alone["averages"] != alone["weights"]
    file = load_file(tmp_path / "both" / "average" / "extra_6.safetensors")
    close({name: value.tolist() for name, value in file.items()}, both[0]["averages"])
    assert [path.name for path in (tmp_path / "both" / "extra").iterdir()] == ["extra_4"]


# CI: replicated; sharded averages are resumed in test_callback_resume.
@pytest.mark.soak_cases("sharded")
@pytest.mark.parametrize("engine", ENGINES)
def test_an_average_that_is_resumed_is_that_of_the_unbroken_run(tmp_path, engine):
    options = {"backend": ENGINES[engine], "save": 2}
    unbroken = run_ranks(2, fit, tmp_path / "unbroken", averaging, options)
    run_ranks(2, fit, tmp_path / "broken", averaging, options | {"steps": 4})
    resumed = run_ranks(2, fit, tmp_path / "broken", averaging, options)
    assert resumed == unbroken


def test_shared_batch_norms_of_two_processes_are_those_of_one(tmp_path):
    [alone] = run_ranks(1, fit, tmp_path / "alone", sharing, {"batch_size": 4})
    both = run_ranks(2, fit, tmp_path / "both", sharing, {})
    assert both[0] == both[1]
    close(both[0]["weights"], alone["weights"])


# CI: sharded.
@pytest.mark.soak_cases("replicated")
@pytest.mark.parametrize("engine", ENGINES)
def test_adapters_of_two_processes_are_those_of_one(tmp_path, engine):
    options = {"backend": ENGINES[engine]}
    [alone] = run_ranks(1, fit, tmp_path / "alone", adapting, {"batch_size": 4})
    both = run_ranks(2, fit, tmp_path / "both", adapting, options)
    close(both[0]["weights"], alone["weights"], rtol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"loss_scaling": "batch_size", "loss_weight": 0.3}])
def test_the_perplexity_of_two_processes_is_that_of_all_tokens(tmp_path, changes):
    # 7 rows, one per process and batch: one process has a padding batch at the end
    found, other = run_ranks(2, validate, tmp_path, 1, changes)
    assert found[:2] == pytest.approx(found[2:], rel=1e-6)
    assert other == found[2:]
