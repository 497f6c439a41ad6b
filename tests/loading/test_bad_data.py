"""Loaders that do what they should not: one message that says where, or a warning."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from tests.doubles import Scale

NUM = 20


class Points(Dataset):
    """Says that it has more samples than it has, if `missing` are."""

    def __init__(self, missing: int = 0) -> None:
        self.missing = missing

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, idx: int) -> torch.Tensor:
        if idx >= NUM - self.missing:
            raise IndexError(f"there is no sample {idx}")
        return torch.tensor(float(idx))


class Batches(Sampler[list[int]]):
    """Yields these batches in each epoch, and says that there are so many."""

    def __init__(self, said: int | None, *epochs: list[list[int]]) -> None:
        self.said = said
        self.epochs = epochs
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(self.epochs[self.epoch % len(self.epochs)])

    def __len__(self) -> int:
        if self.said is None:
            raise TypeError("no length")
        return self.said


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def notes_of(trainer: Any, loader: Any, error: type[Exception]) -> list[str]:
    with pytest.raises(error) as caught:
        trainer.fit(loader)
    return [note for note in caught.value.__notes__ if note.startswith("raised while")]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_index_out_of_range_is_said_with_epoch_batch_and_indices(trainer_of, workers) -> None:
    sampler = Batches(2, [[0, 1], [2, 3]], [[4, 5], [6, 99]])
    data = TensorDataset(torch.arange(20.0))
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers, collate_fn=first)
    found = notes_of(trainer_of(model=Scale, num_epochs=3), loader, IndexError)
    assert found == ["raised while train_dataloader loaded batch 1 of epoch 2, samples 6, 99"]


def first(samples: list[Any]) -> torch.Tensor:
    return torch.stack([sample[0] for sample in samples])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collation_that_fails_on_one_batch_is_said_with_it(trainer_of, workers) -> None:
    loader = DataLoader(Points(), 4, num_workers=workers, collate_fn=failing)
    found = notes_of(trainer_of(model=Scale, num_epochs=1), loader, ValueError)
    assert found == [
        "raised while train_dataloader loaded batch 2 of epoch 1, samples 8, 9, 10, 11"
    ]


def failing(samples: list[torch.Tensor]) -> torch.Tensor:
    if samples[0] == 8:
        raise ValueError("cannot be collated")
    return torch.stack(samples)


def test_a_data_set_that_is_shorter_than_it_says_is_said_with_the_batch(trainer_of) -> None:
    loader = DataLoader(Points(missing=2), 4)
    found = notes_of(trainer_of(model=Scale, num_epochs=1), loader, IndexError)
    assert found == [
        "raised while train_dataloader loaded batch 4 of epoch 1, samples 16, 17, 18, 19"
    ]


# torch's handler of SIGCHLD raises wherever the process is, sometimes within a __del__.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_dies_is_said_with_the_batch(trainer_of) -> None:
    loader = DataLoader(Dying(), 4, num_workers=1)
    [said] = notes_of(trainer_of(model=Scale, num_epochs=1), loader, RuntimeError)
    assert said.startswith("raised while train_dataloader loaded batch")


class Dying(Points):
    def __getitem__(self, idx):
        if idx == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(idx)


@pytest.mark.parametrize(("said", "which"), [(2, 0), (4, 1)])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.slow_cases(every=4)
def test_another_number_of_batches_than_it_says_is_warned_of_with_both(
    trainer_of, caplog, said, which, workers
) -> None:
    epochs = [[[0, 1], [2, 3]], [[4, 5], [6, 7], [8, 9], [10, 11]]]
    sampler = Batches(said, epochs[which], epochs[1 - which])
    loader = DataLoader(Points(), batch_sampler=sampler, num_workers=workers)
    trainer = trainer_of(model=Scale, num_epochs=2)
    trainer.fit(loader)
    assert trainer.global_step == 6
    [warned] = [text for text in warnings_of(caplog) if "length" in text]
    num = "more than 2" if said == 2 else "2"
    assert f"yielded {num} batches in epoch 2, but its length is {said}" in warned


def test_a_sampler_without_a_length_is_trained_on(trainer_of, caplog) -> None:
    loader = DataLoader(Points(), batch_sampler=Batches(None, [[0, 1], [2]], [[3, 4]]))
    trainer = trainer_of(model=Scale, num_epochs=3)
    trainer.fit(loader)
    assert trainer.global_step == 5
    assert warnings_of(caplog) == []


def test_an_empty_epoch_is_refused(trainer_of) -> None:
    loader = DataLoader(Points(), batch_sampler=Batches(2, []))
    with pytest.raises(ValueError, match="train_dataloader yields no batch"):
        trainer_of(model=Scale, num_epochs=1).fit(loader)
