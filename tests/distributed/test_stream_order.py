"""A stream of data epochs over 2, 1 and 4 processes, with another batch size, and in validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from tests.core.test_stream_position import loader_of, stream
from tests.distributed.ranks import run_ranks
from tests.doubles import Scale

pytestmark = pytest.mark.slow

SIZE = 4
Seen = dict[int, list[float]]


class Watch(Callback):
    """Keeps which rows were trained on and validated at each step, and the losses."""

    def __init__(self) -> None:
        self.trained: Seen = {}
        self.validated: Seen = {}
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.trained[trainer.global_step] = [] if trainer.is_padding else batch.tolist()

    def on_validate_batch_start(self, trainer, model, batch, batch_idx):
        rows = [] if trainer.val_iterator.is_padding else batch.tolist()
        self.validated.setdefault(batch_idx + 100 * trainer.global_step, []).extend(rows)

    def on_metrics(self, trainer, metrics, step):
        if "loss" in metrics:
            self.losses[step] = float(metrics["loss"])


def train(rank: int, folder: Path, steps: int, size: int, carries: bool) -> Any:
    watch = Watch()
    trainer = Trainer(
        device="cpu",
        model=Scale,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.001),
        loop=TrainingLoop(max_steps=steps, eval_frequency=3),
        checkpoint=Checkpoint(steps=steps),
        callbacks=[watch],
        model_dir=folder,
        seed=1,
    )
    trainer.fit(loader_of(size, carries=carries), loader_of(SIZE, carries=carries, seed=9))
    trainer.close()
    return watch.trained, watch.validated, watch.losses


def merged(results: list[Any]) -> tuple[Seen, Seen, dict[int, float]]:
    parts = [
        {key: [row for one in results for row in one[kind][key]] for key in results[0][kind]}
        for kind in (0, 1)
    ]
    return parts[0], parts[1], results[0][2]


@pytest.mark.parametrize("carries", [True, False])
def test_every_number_of_processes_trains_and_validates_on_the_same_rows(tmp_path, carries) -> None:
    expected = merged(run_ranks(1, train, tmp_path / "whole", 12, SIZE, carries))
    found: tuple[Seen, Seen, dict[int, float]] = ({}, {}, {})
    for count, steps in [(2, 4), (1, 7), (4, 12)]:
        for all_, one in zip(
            found,
            merged(run_ranks(count, train, tmp_path / "chain", steps, SIZE, carries)),
            strict=True,
        ):
            all_.update(one)
    rows, validated, losses = found
    assert rows == expected[0]
    assert losses == pytest.approx(expected[2], abs=1e-6)
    validations = {key // 100 for key in validated}
    assert validations >= {3, 6, 9, 12}
    of_epoch_0 = stream(1, seed=9, carries=carries)
    for step in validations:
        batches = [validated[key] for key in sorted(validated) if key // 100 == step]
        assert [row for batch in batches for row in batch] == of_epoch_0


def test_another_batch_size_on_other_processes_goes_on_in_the_stream(tmp_path) -> None:
    run_ranks(2, train, tmp_path, 5, 4, True)  # 20 samples
    rows, *_ = merged(run_ranks(1, train, tmp_path, 9, 5, True))
    order = stream(12)
    assert [rows[step] for step in sorted(rows)] == [
        order[start : start + 5] for start in (20, 25, 30, 35)
    ]
