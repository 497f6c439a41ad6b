"""A run that resumes over 1, 3, 2 and 4 processes: every sample once, and the same losses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler

from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.zoo.data import ShardedStream
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.slow

NUM = 77  # samples of an epoch; 7 batches of 12, the last one of 5
WHOLE = 12  # samples of a batch of all processes
CHAIN = [(1, 3), (3, 9), (2, 12), (4, 14)]  # processes, and the step at which they end
POINTS = torch.randn(NUM, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Sample = tuple[int, Tensor]


class Points(Dataset[Sample]):
    def __len__(self) -> int:
        return NUM

    def __getitem__(self, idx: int) -> Sample:
        return idx, POINTS[idx]


class Augmented(Points):
    """Adds a random number to each sample, and asks for seeds of each."""

    seed_each_sample = True

    def __getitem__(self, idx: int) -> Sample:
        return idx, POINTS[idx] + random.random() + float(torch.rand(()))


class OwnGenerator(Sampler[int]):
    """Its generator goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(NUM).tolist())

    def __len__(self) -> int:
        return NUM


class Stream(IterableDataset[Sample]):
    """Samples in an order of each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return np.random.default_rng([5, self.epoch]).permutation(NUM).tolist()

    def __iter__(self) -> Iterator[Sample]:
        for idx in self.order():
            yield idx, POINTS[idx]


class Seekable(Stream):
    """Begins anywhere."""

    def iter_from(self, index: int) -> Iterator[Sample]:
        for idx in self.order()[index:]:
            yield idx, POINTS[idx]


class Mixture(Stream):
    """Packs documents of two sources, two of the first for one of the second, into rows."""

    def __iter__(self) -> Iterator[Sample]:
        generator = np.random.default_rng([6, self.epoch])
        first, second = (generator.permutation(NUM) for _ in range(2))
        documents = np.concatenate(
            [first[: 2 * (NUM // 3)].reshape(-1, 2), second[: NUM // 3, None]], 1
        )
        tokens: list[float] = []
        num = 0
        for document in documents.flatten():
            tokens += [float(value) for value in POINTS[document][: 2 + document % 5]]
            while len(tokens) >= 6:
                yield num, torch.tensor(tokens[:6], dtype=torch.float64)
                tokens, num = tokens[6:], num + 1


def loader_of(kind: str, count: int) -> DataLoader[Any]:
    size, workers = WHOLE // count, {"num_workers": 2 if kind.endswith("workers") else 0}
    match kind.removesuffix(" workers"):
        case "map-style":
            return DataLoader(Points(), size, shuffle=True, **workers)
        case "augmented":
            return DataLoader(Augmented(), size, shuffle=True, **workers)
        case "weighted":
            weights = [1.0 + number % 3 for number in range(NUM)]
            return DataLoader(
                Points(), size, sampler=WeightedRandomSampler(weights, NUM), **workers
            )
        case "own sampler":
            return DataLoader(Points(), size, sampler=OwnGenerator(), **workers)
        case "stream":
            return DataLoader(ShardedStream(Stream()), size, **workers)
        case "seekable":
            return DataLoader(ShardedStream(Seekable()), size, **workers)
        case "global":
            loader: DataLoader[Any] = DataLoader(ShardedStream(Stream()), WHOLE, **workers)
            loader.is_global_batch = True  # type: ignore[attr-defined]
            return loader
    return DataLoader(ShardedStream(Mixture()), size, **workers)


class Net(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 1, dtype=torch.float64)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"loss": ((super().forward(batch[1]) - batch[1].sum(1, keepdim=True)) ** 2).mean()}


class Watch(Callback):
    """Keeps which samples were trained on at each step, and the losses of all processes."""

    def __init__(self) -> None:
        self.samples: dict[int, list[int]] = {}
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.samples[trainer.global_step] = [] if trainer.is_padding else batch[0].tolist()

    def on_metrics(self, trainer, metrics, step):
        if "loss" in metrics:
            self.losses[step] = float(metrics["loss"])


def train(rank: int, folder: Path, kind: str, count: int, steps: int) -> Any:
    """Train up to a step, from the newest checkpoint; return what `Watch` has seen."""
    watch = Watch()
    trainer = Trainer(
        device="cpu",
        model=Net,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02),
        loop=TrainingLoop(max_steps=steps),
        checkpoint=Checkpoint(steps=steps),
        callbacks=[watch],
        model_dir=folder,
        seed=1,
    )
    trainer.fit(loader_of(kind, count))
    trainer.close()
    return watch.samples, watch.losses


def merged(results: list[Any]) -> tuple[dict[int, list[int]], dict[int, float]]:
    steps = results[0][0].keys()
    samples = {step: [idx for one, _ in results for idx in one[step]] for step in steps}
    return samples, results[0][1]


KINDS = [
    "map-style",
    "augmented",
    "weighted",
    "own sampler",
    "stream",
    "seekable",
    "global",
    "mixture",
]


# CI: each kind of data; workers with one of them.
@pytest.mark.soak_cases("map-style workers", "mixture workers")
@pytest.mark.parametrize("kind", [*KINDS, "map-style workers", "stream workers", "mixture workers"])
def test_each_sample_is_trained_on_once_with_the_same_losses(tmp_path: Path, kind: str) -> None:
    last = CHAIN[-1][1]
    whole, expected = merged(run_ranks(1, train, tmp_path / "whole", kind, 1, last))
    samples: dict[int, list[int]] = {}
    losses: dict[int, float] = {}
    for count, steps in CHAIN:
        found = merged(run_ranks(count, train, tmp_path / "chain", kind, count, steps))
        assert not samples.keys() & found[0].keys()
        samples |= found[0]
        losses |= found[1]
    assert samples == whole
    assert losses == pytest.approx(expected, abs=1e-6)
    assert sorted(losses) == list(range(1, last + 1))
    if kind.split()[0] in ("map-style", "augmented", "own", "stream", "seekable", "global"):
        assert sorted(idx for step in range(1, 8) for idx in samples[step]) == list(range(NUM))


def train_epochs(rank: int, folder: Path, count: int, max_steps: int | None) -> tuple[int, int]:
    with Trainer(
        device="cpu",
        model_dir=folder,
        model=Net,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        loop=TrainingLoop(num_epochs=2, max_steps=max_steps),
        checkpoint=Checkpoint(steps=6),
        seed=1,
    ) as trainer:
        trainer.fit(DataLoader(Points(), WHOLE // 3))
        return trainer.global_step, trainer.data.epoch


def test_epochs_decide_the_length_also_when_the_number_of_processes_changes(tmp_path):
    # 20 batches of 4; after 6, and with three processes, 5 batches of 12 are left, then 7.
    assert run_ranks(1, train_epochs, tmp_path, 1, 6) == [(6, 0)]
    assert run_ranks(3, train_epochs, tmp_path, 3, None) == [(6 + 5 + 7, 2)] * 3


class StopOnce(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.early_exit.interrupt("max_time")


def train_again(rank: int, folder: Path, step: int) -> tuple[list[str | None], int, list[float]]:
    stop, ends = StopOnce(step), []
    with Trainer(
        device="cpu",
        model_dir=folder,
        model=Net,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        loop=TrainingLoop(num_epochs=2),
        callbacks=[stop],
        seed=1,
    ) as trainer:
        for _ in range(2 if step else 1):
            trainer.fit(DataLoader(Points(), WHOLE // 3, shuffle=True))
            ends.append(trainer.interrupted)
            stop.step = 0
        return ends, trainer.global_step, trainer.model.weight.flatten().tolist()


def test_several_processes_finish_a_fit_that_was_interrupted(tmp_path):
    whole = run_ranks(2, train_again, tmp_path / "whole", 0)
    again = run_ranks(2, train_again, tmp_path / "again", 3)
    for (ends, num, weights), (_, num_whole, expected) in zip(again, whole, strict=True):
        assert (ends, num) == (["max_time", None], num_whole)
        assert weights == expected
