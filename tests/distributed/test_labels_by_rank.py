"""Processes of which one has labels that count and the other has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from modelzoo_trainer import Callback, Trainer, TrainingLoop
from modelzoo_trainer.zoo.models.decoder_names import Gpt2
from modelzoo_trainer.zoo.rows.hdf5_format import IGNORED_LABEL
from tests.distributed.ranks import run_ranks, try_ranks
from tests.zoo.models import decoder_cases

LABELLED, EMPTY = True, False
pytestmark = pytest.mark.ranks(2)


class Seen(Callback):
    """Whether a label counts in each batch of this process."""

    def __init__(self) -> None:
        self.train: list[bool] = []
        self.validation: list[bool] = []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.train.append(bool(model.count_labels(batch)))

    def on_validate_batch_start(self, trainer, model, batch, batch_idx):
        self.validation.append(bool(model.count_labels(batch)))


def rows(*labelled: bool) -> DataLoader[Any]:
    """Return a loader of a row a process: those of both processes in turn."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(1, 51, (len(labelled), 9), generator=generator)
    labels = ids[:, 1:].clone()
    labels[~torch.tensor(labelled)] = IGNORED_LABEL
    samples = [{"input_ids": a, "labels": b} for a, b in zip(ids[:, :-1], labels, strict=True)]
    return DataLoader(samples, batch_size=1)  # type: ignore[arg-type]  # a list is a dataset


def train(
    rank: int, folder: Path, trained: tuple[bool, ...], validated: tuple[bool, ...]
) -> tuple[int, Seen, list[float]]:
    torch.manual_seed(1)
    seen = Seen()
    with Trainer(
        device="cpu",
        model_dir=folder,
        model=Gpt2(**decoder_cases.SIZES | decoder_cases.NO_DROPOUT),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(num_epochs=1, eval_frequency="epoch"),
        callbacks=[seen],
        progress="none",
        seed=1,
    ) as trainer:
        result = trainer.fit(rows(*trained), rows(*validated))
        assert all(bool(weight.isfinite().all()) for weight in trainer.model.parameters())
        return trainer.global_step, seen, [float(result.metrics["validate_0/loss"])]


@pytest.mark.slow
@pytest.mark.parametrize("first", [(LABELLED, EMPTY), (EMPTY, LABELLED)])
def test_labels_on_one_process_are_enough(tmp_path: Path, first: tuple[bool, bool]) -> None:
    both = run_ranks(2, train, tmp_path, (*first, LABELLED, LABELLED), first, timeout_s=60)
    for rank, (step, seen, losses) in enumerate(both):
        assert step == 2
        assert (seen.train, seen.validation) == ([first[rank], LABELLED], [first[rank]])
        assert losses == both[0][2]
        assert losses[0] > 3  # about log(51): a row without a label does not halve it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "validated", "what"),
    [
        ((EMPTY, EMPTY, LABELLED, LABELLED), (LABELLED, LABELLED), "first batch"),
        ((LABELLED, LABELLED), (EMPTY,) * 4, "validation"),
    ],
)
def test_labels_on_no_process_are_one_error_on_both(
    tmp_path: Path, trained: tuple[bool, ...], validated: tuple[bool, ...], what: str
) -> None:
    for has_ended, text in try_ranks(2, train, tmp_path, trained, validated, timeout_s=60):
        assert not has_ended
        assert f"ConfigError: The {what} has no label that counts" in text
