"""What Lightning Fabric offers to a loop, by the trainer and its backends: FB-26 to FB-39."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    CheckpointMismatch,
    ConfigError,
    Logger,
    MixedPrecision,
    checkpointing,
)
from modelzoo_trainer.callbacks import RateProfiler
from modelzoo_trainer.loggers.csv_logger import CSVLogger
from tests.distributed.ranks import run_ranks
from tests.distributed.training import make_trainer as make_ranked
from tests.distributed.training import samples
from tests.doubles import History, Scale, TinyModel, make_trainer, sgd, tiny_batches


def grads_of(model: nn.Module) -> list[float]:
    return [grad for param in model.parameters() for grad in param.grad.flatten().tolist()]


class Grads(Callback):
    """Keeps the gradients after each batch and the order of its samples."""

    def __init__(self) -> None:
        self.after_batch: list[list[float]] = []
        self.clipped: list[float] = []

    def on_after_backward(self, trainer, model, outputs):
        self.after_batch.append(grads_of(model))

    def on_after_optimizer_step(self, trainer, model, optimizer):
        self.clipped = grads_of(model)


class Numbered(TensorDataset):
    """Samples that are told of the pass."""

    epochs: list[int]

    def set_epoch(self, epoch: int) -> None:
        self.epochs = [*getattr(self, "epochs", []), epoch]


def plain(tree: Any) -> Any:
    """Return a structure with lists for tensors, as a pipe takes it."""
    return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, tree)


def in_a_process(rank: int, folder: Path) -> dict[str, Any]:
    """Train on 4 batches of 2 in windows of 2 batches, and meet the other process."""
    grads = Grads()
    trainer = make_ranked(folder / "run", callbacks=[grads], epochs=1, accumulate=2)
    backend = trainer.backend
    trainer.fit(DataLoader(Numbered(*samples(8).tensors), batch_size=1, shuffle=True))
    tree = {"rank": rank, "parts": [torch.full((2,), float(rank))]}
    if backend.is_main:
        (folder / "made").write_text("by the first")
    backend.barrier("made")
    return {
        "num_batches": len(trainer.record.batches),
        "grads": grads.after_batch,
        "gathered": plain(backend.gather_object(tree)),
        "sent": plain(backend.broadcast_object(tree)),
        "sum": backend.reduce(torch.tensor([1.0 + rank]), "sum").tolist(),
        "mean": backend.reduce(torch.tensor(1.0 + rank), "mean").item(),
        "is_main": backend.is_main,
        "saw": (folder / "made").exists(),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict[str, Any]]:
    """What two processes found."""
    return run_ranks(2, in_a_process, tmp_path_factory.mktemp("two"))


def test_fb_26_setup_contract(trainer_of) -> None:
    model = TinyModel()
    optimizer = sgd(model)
    trainer = trainer_of(model=model, optimizer=optimizer)
    assert (trainer.model is model, trainer.optimizer is optimizer) == (True, True)
    assert trainer.schedulers == []
    with pytest.raises(ConfigError, match="optimizer is an instance, but model is a function"):
        trainer_of(model=TinyModel, optimizer=optimizer)


@pytest.mark.slow
def test_fb_27_dataloader_setup(two, trainer_of) -> None:
    assert [found["num_batches"] for found in two] == [4, 4]  # of 8
    data = Numbered(torch.arange(6.0))
    order = []

    class Order(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            order.append(batch[0].item())

    class Own(Scale):
        def forward(self, batch):
            return super().forward(batch[0])

    loader = DataLoader(data, shuffle=True)
    trainer_of(Order(), model=Own, num_epochs=2).fit(loader)
    assert sorted(order[:6]) == sorted(order[6:]) == list(range(6))
    assert order[:6] != order[6:]
    assert data.epochs == [0, 1]


@pytest.mark.slow
def test_fb_29_no_backward_sync(two) -> None:
    first, second = (found["grads"] for found in two)
    for window in (0, 2):
        assert first[window] != second[window]  # each process its own
        assert first[window + 1] == pytest.approx(second[window + 1], rel=1e-12)


def test_fb_30_clip(trainer_of) -> None:
    def gradients_with(**settings: float) -> torch.Tensor:
        grads = Grads()
        precision = MixedPrecision(enabled=False, **settings)
        trainer_of(grads, precision=precision).fit(tiny_batches(1))
        return torch.tensor(grads.clipped)

    free = gradients_with()
    clipped = gradients_with(max_gradient_norm=0.1)
    torch.testing.assert_close(clipped, free * 0.1 / free.norm(), rtol=1e-4, atol=1e-7)
    limited = gradients_with(max_gradient_value=0.01)
    assert torch.equal(limited, free.clamp(-0.01, 0.01))
    with pytest.raises(ConfigError, match="max_gradient_norm or max_gradient_value, not both"):
        MixedPrecision(max_gradient_norm=1.0, max_gradient_value=1.0)


def test_fb_31_save_load(trainer_of, tmp_path) -> None:
    class Adds(Callback):
        def on_save_checkpoint(self, trainer, state_dict):
            state_dict["mine"] = {"value": 3}

        def postprocess_checkpoint(self, trainer, state_dict):
            del state_dict["rng"]  # a filter

        def on_load_checkpoint(self, trainer, state_dict):
            self.loaded = state_dict["mine"]

    adds = Adds()
    trainer = trainer_of(adds)
    trainer.fit(tiny_batches())
    path = trainer.save_checkpoint()
    weight = trainer.model.head.weight
    saved = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
    trainer.load_checkpoint(path)
    assert trainer.model.head.weight is weight  # in place
    assert torch.equal(weight, saved)
    assert adds.loaded == {"value": 3}
    content = checkpointing.load(path)
    assert content["mine"] == {"value": 3}
    assert "rng" not in content
    with pytest.raises(CheckpointMismatch, match="missing"):
        trainer_of(model=lambda: nn.Linear(2, 2), model_dir=tmp_path / "b").load_checkpoint(path)
    loose = Checkpoint(disable_strict_checkpoint_loading=True)
    other = trainer_of(adds, checkpoint=loose, model_dir=tmp_path / "c")
    other.load_checkpoint(path)
    assert torch.equal(other.model.head.weight, saved)


@pytest.mark.slow
def test_fb_32_collectives(two, trainer_of) -> None:
    for found in two:
        first, second = found["gathered"]
        assert first == found["sent"] == {"rank": 0, "parts": [[0.0, 0.0]]}
        assert second == {"rank": 1, "parts": [[1.0, 1.0]]}
        assert (found["sum"], found["mean"]) == ([3.0], 1.5)
    alone = trainer_of().backend
    assert alone.gather_object({"x": 1}) == [{"x": 1}]
    assert alone.reduce(torch.ones(2), "mean").shape == (2,)


@pytest.mark.slow
def test_fb_33_rank_zero_first(two) -> None:
    assert [found["is_main"] for found in two] == [True, False]
    assert [found["saw"] for found in two] == [True, True]


class Draws(Callback):
    """Draws from all generators in each batch."""

    def __init__(self) -> None:
        self.drawn: list[Any] = []

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))


def test_fb_34_seeding(tmp_path) -> None:
    def draws_with(seed: int, name: str) -> list[Any]:
        draws = Draws()
        with make_trainer(tmp_path / name, draws, seed=seed) as trainer:
            trainer.fit(tiny_batches())
        return draws.drawn

    assert draws_with(3, "a") == draws_with(3, "b") != draws_with(4, "c")
    with pytest.raises(ConfigError, match=r"seed: .* integer .* \[0, 4294967296\) .*, got -1"):
        make_trainer(tmp_path / "d", seed=-1)
    with pytest.raises(ConfigError, match=r"seed: expected .*, got 4294967296"):
        make_trainer(tmp_path / "d", seed=2**32)


def test_fb_35_log(trainer_of) -> None:
    class Logs(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.log_metrics(twice=outputs["loss"].detach() * 2)

    loggers = [History(), History()]
    trainer_of(Logs(), loggers=loggers).fit(tiny_batches(2))
    first, second = loggers
    assert first.lines == second.lines
    assert first.steps == [1, 2]
    for step, line in first.lines:
        assert type(line["twice"]) is float, step
        assert line["twice"] == pytest.approx(2 * line["loss"])
    trainer = trainer_of(Logs(), loggers=(), progress="none")
    trainer.fit(tiny_batches(1))
    assert trainer.loggers == []


def test_fb_36_csv_logger(trainer_of, tmp_path) -> None:
    class Late(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if trainer.global_step == 2:
                trainer.log_metrics(late=1.5)

    def table(path: Path) -> list[dict[str, str]]:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    trainer = trainer_of(Late(), loggers=CSVLogger())
    trainer.fit(tiny_batches(2))
    rows = table(trainer.model_dir / "metrics.csv")
    assert [row["step"] for row in rows] == ["1", "2"]
    assert [row["late"] for row in rows] == ["", "1.5"]
    trainer.fit(tiny_batches(1))
    assert [row["step"] for row in table(trainer.model_dir / "metrics.csv")] == ["1", "2", "3"]
    trainer.close()
    trainer_of(loggers=CSVLogger(), checkpoint=Checkpoint(autoload_last_checkpoint=False)).fit(
        tiny_batches(1)
    )
    assert len(list(trainer.model_dir.glob("metrics*.csv"))) == 2  # another run, another version


def test_fb_37_init_module(trainer_of) -> None:
    made = []

    def build() -> nn.Module:
        model = TinyModel().to(torch.bfloat16)
        made.append(model.head.weight.device.type)
        return model

    trainer = trainer_of(model=build, device="meta")
    assert made == ["meta"]  # built on the device, not moved there
    assert trainer.model.head.weight.dtype == torch.bfloat16


def test_fb_38_throughput(trainer_of) -> None:
    class Rates(Logger):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def log_metrics(self, metrics, step):
            if "local_samples_per_sec" in metrics:
                self.steps.append(step)

    profiler, rates = RateProfiler(), Rates()
    trainer_of(profiler, loggers=rates).fit(tiny_batches(5, size=4))
    figures = profiler.perf_metrics
    assert (figures["total_steps"], figures["total_samples"]) == (4, 16)  # without the first
    assert figures["total_time"] > 0
    assert figures["samples_per_sec"] == pytest.approx(16 / figures["total_time"])
    assert rates.steps == [2, 3, 4, 5]


class Types(TinyModel):
    """Notes the types that it computes in."""

    def forward(self, batch):
        inputs, targets = batch
        hidden = self.hidden(inputs.to(self.hidden.weight.dtype))
        logits = self.head(hidden)
        self.computed, self.returned = hidden.dtype, logits.dtype
        return ((logits.float() - targets) ** 2).mean()


@pytest.mark.parametrize(
    ("held", "mixed", "computed"),
    [
        (torch.float32, False, torch.float32),
        (torch.float64, False, torch.float64),
        (torch.bfloat16, False, torch.bfloat16),
        (torch.float32, True, torch.bfloat16),
    ],
    ids=["32-true", "64-true", "bf16-true", "bf16-mixed"],
)
def test_fb_39_precision(trainer_of, held, mixed, computed) -> None:
    model = Types().to(held)
    trainer = trainer_of(model=model, optimizer=sgd(model), precision=MixedPrecision(enabled=mixed))
    trainer.fit(tiny_batches(1))
    assert (model.computed, model.returned) == (computed, computed)
    assert {param.dtype for param in model.parameters()} == {held}
