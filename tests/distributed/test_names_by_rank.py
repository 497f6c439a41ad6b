"""Processes whose batches have other metrics, weights, layers or gradients than those of others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import (
    ComputeNormGNS,
    EarlyStopping,
    ModelEvalMetrics,
    RunHistory,
    SaveBest,
)
from tests.distributed.ranks import run_ranks, try_ranks
from tests.doubles import History


class ByClass(nn.Linear):
    """A batch has the metrics of its own class alone, and only some have a loss."""

    def __init__(self) -> None:
        super().__init__(1, 1, dtype=torch.float64)

    def forward(self, batch: Any) -> Any:
        value = batch[0][0, 0]
        found = {f"value_{int(value) % 3}": value, "first" if value == 0 else "rest": value}
        if value % 2 == 0:
            found["loss"] = super().forward(batch[0]).square().mean()
        return found

    def validation_means(self, outputs: Any, batch: Any) -> Any:
        value = batch[0][0, 0]
        means = {f"recall_{int(value) % 4}": (value / 10, 1 + value, None)}
        means[f"perplexity_{int(value) % 5}"] = (value / 10, torch.tensor(2.0), torch.exp)
        return means


def numbers(first: int, num: int) -> DataLoader[Any]:
    data = torch.arange(first, first + num, dtype=torch.float64).reshape(num, 1)
    return DataLoader(TensorDataset(data), batch_size=1)


def make(folder: Path, model: nn.Module, **options: Any) -> Trainer:
    return Trainer(
        device="cpu",
        model_dir=folder,
        model=model,
        optimizer=lambda built: torch.optim.SGD(built.parameters(), lr=0.01),
        seed=1,
        **options,
    )


def validate(rank: int, folder: Path) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    with make(folder, ByClass(), callbacks=[ModelEvalMetrics()]) as trainer:
        loaders = [numbers(0, 11), numbers(11, 2), numbers(0, 11)]
        return [dict(trainer.validate(loader, ckpt_path=None).metrics) for loader in loaders]


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 3])
def test_metrics_that_only_some_processes_have_are_those_of_one_process(tmp_path, num):
    alone = validate(0, tmp_path / "alone")
    together = run_ranks(num, validate, tmp_path / "together")
    assert alone[0].keys() > {"loss", "value_0", "recall_3", "perplexity_4", "first", "rest"}
    assert alone[1].keys() != alone[0].keys()
    for found in together:
        assert found == together[0]
        for own, expected in zip(found, alone, strict=True):
            assert own == pytest.approx(expected, rel=1e-12)


class Odd(nn.Linear):
    """The validation metrics of a process that are not those of the other."""

    def __init__(self, rank: int, kind: str) -> None:
        super().__init__(1, 1, dtype=torch.float64)
        self.rank, self.kind = rank, kind

    def forward(self, batch: Any) -> Any:
        found = {"loss": super().forward(batch[0]).square().mean()}
        if self.kind == "num_items" and self.rank:
            found["num_items"] = torch.tensor(5)
        return found

    def validation_means(self, outputs: Any, batch: Any) -> Any:
        function = torch.exp if self.kind == "function" and self.rank else None
        value = torch.ones(3 if self.kind == "shape" and self.rank else ())
        return {"score": (value, 1.0, function)}


def validate_odd(rank: int, folder: Path, kind: str) -> None:
    with make(folder, Odd(rank, kind), callbacks=[ModelEvalMetrics()]) as trainer:
        trainer.validate(numbers(0, 4), ckpt_path=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "what"),
    [
        ("function", "score", "process 0: without a function; process 1: with a function"),
        ("shape", "score", r"process 1: shape \(3,\)"),
        ("num_items", "loss", "process 0: weighted by samples; process 1: weighted by num_items"),
    ],
)
def test_metrics_that_cannot_be_averaged_are_one_error_on_all_processes(tmp_path, kind, name, what):
    for has_ended, text in try_ranks(2, validate_odd, tmp_path, kind, timeout_s=60):
        assert not has_ended
        assert re.search(f"ConfigError: .*'{name}' .*{what}", text), text


class Counting(nn.Linear):
    """Counts items from one batch on, on one process."""

    def __init__(self, rank: int, first: int) -> None:
        super().__init__(1, 1, dtype=torch.float64)
        self.num_left = first if rank == 1 else 1000

    def forward(self, batch: Any) -> Any:
        found = {"loss": super().forward(batch[0]).square().mean()}
        self.num_left -= 1
        return found | ({"num_items": torch.tensor(4)} if self.num_left < 0 else {})


def train_counting(rank: int, folder: Path, first: int) -> None:
    with make(folder, Counting(rank, first)) as trainer:
        trainer.fit(numbers(0, 8))


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("first", [0, 2])
def test_items_that_only_one_process_counts_are_an_error_on_all(tmp_path, first):
    results = try_ranks(2, train_counting, tmp_path, first, timeout_s=60)
    assert [has_ended for has_ended, _ in results] == [False, False]
    assert any("num_items" in text and f"batch {first} of epoch 1" in text for _, text in results)


def add_history(rank: int, folder: Path) -> list[int]:
    num_steps = []
    for steps, callbacks in ((3, []), (6, [RunHistory()])):
        loop, saved = TrainingLoop(max_steps=steps), Checkpoint(steps=3)
        with make(folder, Counting(0, 0), loop=loop, checkpoint=saved, callbacks=callbacks) as one:
            one.fit(numbers(0, 10))
            num_steps.append(one.global_step)
    return num_steps


@pytest.mark.slow
def test_processes_that_resume_with_a_history_for_the_first_time_train_on(tmp_path):
    assert run_ranks(2, add_history, tmp_path) == [[3, 6], [3, 6]]


class Branches(nn.Module):
    """A batch uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        self.double()

    def forward(self, batch: Any) -> Any:
        return self.layers[int(batch[0][0, 0]) % 2](batch[0]).square().mean()


def train_branches(rank: int, folder: Path, num_accumulated: int) -> dict[str, list[Any]]:
    torch.manual_seed(1)
    history, is_one = History(), num_accumulated > 1
    with make(
        folder,
        Branches(),
        backend=None if is_one else {"find_unused_parameters": True},
        loop=TrainingLoop(num_epochs=1, grad_accum_steps=num_accumulated),
        callbacks=[ComputeNormGNS("Linear")],
        loggers=history,
    ) as trainer:
        trainer.fit(numbers(1, 6))
    names = {name for _, row in history.lines for name in row}
    return {name: history.of(name) for name in sorted(names)}


@pytest.mark.slow
def test_layers_that_only_some_processes_call_have_the_norms_of_one_process(tmp_path):
    alone = train_branches(0, tmp_path / "alone", 2)
    assert "pegsqnorm/layers.0" in alone
    found, _ = run_ranks(2, train_branches, tmp_path / "together", 1)
    assert found.keys() == alone.keys()
    for name, values in alone.items():
        assert found[name] == [(step, pytest.approx(value)) for step, value in values], name


class TwoOptimizers(Trainer):
    def training_step(self, batch: Any) -> Any:
        loss = self.forward(batch)["loss"]
        self.manual_backward(loss)
        self.optimizer_step("all")
        return loss


def train_manually(rank: int, folder: Path, batch_size: int) -> list[float]:
    torch.manual_seed(1)
    data = torch.tensor([[2.0], [3.0], [4.0], [4.0]], dtype=torch.float64)
    with TwoOptimizers(
        device="cpu",
        model_dir=folder,
        model=ByRow(),
        optimizer={
            "all": lambda model: torch.optim.SGD(model.layers.parameters(), lr=0.01),
            "none": lambda model: torch.optim.SGD(model.rest.parameters(), lr=0.01),
        },
        check_loss=False,
        seed=1,
    ) as trainer:
        trainer.fit(DataLoader(TensorDataset(data), batch_size=batch_size))
        return torch.cat([value.flatten() for value in trainer.model.parameters()]).tolist()


class ByRow(Branches):
    """A row uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = nn.Linear(1, 1).double()

    def forward(self, batch: Any) -> Any:
        rows = [self.layers[int(row[0]) % 2](row).square().sum() for row in batch[0]]
        return torch.stack(rows).mean()


@pytest.mark.slow
def test_gradients_that_only_one_process_has_count_as_zero_on_the_other(tmp_path):
    alone = train_manually(0, tmp_path / "alone", 2)
    for found in run_ranks(2, train_manually, tmp_path / "together", 1):
        assert found == pytest.approx(alone, rel=1e-12)


class Scores(Callback):
    """Logs a metric of a validation on some processes only."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def on_validate_end(self, trainer, model, loop):
        if trainer.backend.comm.rank in self.ranks:
            trainer.log_metrics(score=float(trainer.global_step))


def train_scored(rank: int, folder: Path, ranks: tuple[int, ...]) -> list[str]:
    best = SaveBest("validate_0/score", mode="max")
    loop = TrainingLoop(num_epochs=2, eval_frequency="epoch")
    callbacks = [Scores(*ranks), best, EarlyStopping("validate_0/score", patience=5)]
    with make(folder, Counting(0, 0), loop=loop, callbacks=callbacks) as trainer:
        trainer.fit(numbers(0, 4), numbers(0, 2))
    return [entry["name"] for entry in best.best]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "names"), [((0,), ["best_4"]), ((1,), [])])
def test_the_best_weights_are_by_the_metric_of_the_main_process(tmp_path, ranks, names):
    assert run_ranks(2, train_scored, tmp_path, ranks, timeout_s=60) == [names, names]


class Total(nn.Module):
    """A metric in the style of torchmetrics, over all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.reset()

    def reset(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)
        self.seen: list[torch.Tensor] = []

    def update(self, values: torch.Tensor) -> None:
        self.total += values.sum()
        self.seen.append(values)

    def compute(self) -> Any:
        found = torch.stack(
            [self.total, torch.cat(self.seen).numel() * torch.ones_like(self.total)]
        )
        if dist.is_initialized():
            dist.all_reduce(found)
        return {"sum": found[0], "num": found[1]}


class Measured(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1, dtype=torch.float64)
        self.score = Total()

    def forward(self, batch: Any) -> Any:
        self.score.update(batch[0])
        return super().forward(batch[0]).square().mean()


def measure(rank: int, folder: Path) -> dict[str, Any]:
    with make(folder, Measured(), callbacks=[ModelEvalMetrics()]) as trainer:
        metrics = dict(trainer.validate(numbers(1, 5), ckpt_path=None).metrics)
    return {name: value for name, value in metrics.items() if name.startswith("score")}


@pytest.mark.slow
def test_padding_batches_do_not_change_metric_modules(tmp_path):
    for found in run_ranks(3, measure, tmp_path):
        assert found == {"score/sum": 15, "score/num": 5}
