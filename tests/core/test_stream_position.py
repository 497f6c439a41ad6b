"""Runs over a stream of data epochs: validation, resume with another batch size, changed data."""

from __future__ import annotations

import logging
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from modelzoo_trainer import Callback
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.stream import Member, StreamSampler
from tests.doubles import Scale, make_trainer

NUM = 10


class Rows(Dataset[Tensor]):
    """Row i is i; with a checksum, and limits that it notes."""

    def __init__(self, fingerprint: int = 7) -> None:
        self.fingerprint = fingerprint
        self.limits: list[Any] = []

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, idx: int) -> Tensor:
        return torch.tensor(float(idx))

    def check_model(self, vocab_size: int | None, max_position_embeddings: int | None) -> None:
        self.limits.append((vocab_size, max_position_embeddings))
        if vocab_size is not None and vocab_size < NUM:
            raise ConfigError(f"the largest id is {NUM - 1}, but vocab_size is {vocab_size}.")


def loader_of(size: int = 4, dataset: Any = None, *, carries: bool = True, **options: Any) -> Any:
    options = {"shuffle": True, "seed": 3} | options
    sampler = StreamSampler([Member(0, NUM, NUM)], batch_size=size, carries=carries, **options)
    loader = DataLoader(dataset or Rows(), size, sampler=sampler, drop_last=carries)
    loader.is_global_batch = True
    return loader


def stream(num: int, *, carries: bool = True, **options: Any) -> list[float]:
    sampler = loader_of(carries=carries, **options).sampler
    return [float(row) for epoch in range(num) for row in sampler.order(epoch)[:].tolist()]


class Seen(Callback):
    def __init__(self) -> None:
        self.trained: list[list[float]] = []
        self.validated: list[list[float]] = []
        self.ended: list[int] = []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.trained.append(batch.tolist())

    def on_validate_batch_start(self, trainer, model, batch, batch_idx):
        self.validated.append(batch.tolist())

    def on_train_epoch_end(self, trainer, epoch):
        self.ended.append(epoch)


def run(folder: Path, steps: int, loader: Any, val: Any = None, **settings: Any) -> Seen:
    """Train to a step, from the newest checkpoint of the folder, and save one."""
    seen = Seen()
    trainer = make_trainer(
        folder, seen, model=settings.pop("model", Scale), max_steps=steps, **settings
    )
    trainer.fit(loader, val)
    trainer.save_checkpoint()
    trainer.close()
    return seen


def test_epochs_of_a_run_follow_each_other(tmp_path) -> None:
    seen = run(tmp_path, 7, loader_of())
    assert list(chain.from_iterable(seen.trained)) == stream(4)[:28]
    assert seen.ended == [0, 1, 2]


def test_every_validation_has_the_rows_of_epoch_0(tmp_path) -> None:
    first = run(tmp_path, 4, loader_of(), loader_of(seed=9), eval_frequency=2)
    second = run(tmp_path, 6, loader_of(), loader_of(seed=9), eval_frequency=2)
    rows = stream(1, seed=9)
    assert list(chain.from_iterable(first.validated + second.validated)) == rows * 3


@pytest.mark.parametrize(("size", "again"), [(2, 0), (3, 2), (8, 4), (10, 0), (20, 0)])
@pytest.mark.slow_cases(every=4)
def test_another_batch_size_goes_on_in_the_stream(tmp_path, caplog, size, again) -> None:
    steps = 5  # 20 samples: the third epoch's first batch
    caplog.set_level(logging.INFO, "modelzoo_trainer.data")
    run(tmp_path, steps, loader_of(4))
    caplog.clear()
    seen = run(tmp_path, steps + 6, loader_of(size))
    start = 20 - again
    assert list(chain.from_iterable(seen.trained)) == stream(20)[start : start + 6 * size]
    assert f"saved with 4 samples per batch, this run has {size}" in caplog.text
    assert (f"so {again} samples of epoch" in caplog.text) == bool(again)


def test_another_batch_size_without_a_carried_rest(tmp_path, caplog) -> None:
    run(tmp_path, 5, loader_of(4, carries=False))  # 10, then 8 of 10
    seen = run(tmp_path, 7, loader_of(3, carries=False))
    order = stream(2, carries=False)
    assert seen.trained == [order[16:19], order[19:20]]
    assert "so 2 samples of epoch 2 are trained on again" in caplog.text


def test_an_epoch_that_is_not_over_in_the_new_size_does_not_end(tmp_path) -> None:
    first = run(tmp_path, 4, loader_of(4))  # two epochs of 8
    second = run(tmp_path, 6, loader_of(5))  # epochs of 10: 3 batches of 5 are done
    assert (first.ended, second.ended) == ([0, 1], [1])


def test_the_same_batch_size_says_nothing(tmp_path, caplog) -> None:
    run(tmp_path, 3, loader_of(4))
    caplog.clear()
    seen = run(tmp_path, 5, loader_of(4))
    assert list(chain.from_iterable(seen.trained)) == stream(4)[12:20]
    assert not [one for one in caplog.records if one.levelno > logging.INFO]
    assert "samples per batch" not in caplog.text


def test_the_length_of_an_epoch_is_logged(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, "modelzoo_trainer.data")
    run(tmp_path, 1, loader_of(4))
    assert "2 batches of 4, so 8 samples; the data have 10" in caplog.text


@pytest.mark.parametrize(
    "changed",
    [lambda: loader_of(dataset=Rows(8)), lambda: loader_of(seed=4)],
    ids=["data", "order"],
)
def test_changed_data_or_another_order_is_a_warning(tmp_path, caplog, changed) -> None:
    run(tmp_path, 1, loader_of())
    run(tmp_path, 2, loader_of())
    assert "has changed" not in caplog.text
    run(tmp_path, 3, changed())
    assert "the training data has changed" in caplog.text
    assert "checksum" in caplog.text


class Limited(Scale):
    vocab_size = NUM
    max_position_embeddings = 3


def test_the_dataset_gets_the_limits_of_the_model(tmp_path) -> None:
    rows, other = Rows(), Rows()
    val = DataLoader(Subset(other, range(4)), 2)
    run(tmp_path, 2, loader_of(dataset=rows), val, model=Limited, eval_frequency=1)
    assert rows.limits == [(NUM, 3)]
    assert set(other.limits) == {(NUM, 3)}
    assert len(other.limits) >= 2
    plain = Rows()
    run(tmp_path / "other", 1, loader_of(dataset=plain))
    assert plain.limits == [(None, None)]


class Small(nn.Module):
    vocab_size = 5

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: Tensor) -> Tensor:
        raise AssertionError("a step was taken")


def test_data_that_do_not_fit_the_model_are_refused_before_the_first_step(tmp_path) -> None:
    with pytest.raises(ConfigError, match="vocab_size is 5"):
        run(tmp_path, 1, loader_of(), model=Small)
    trainer = make_trainer(tmp_path / "val", model=Small)
    with pytest.raises(ConfigError, match="vocab_size is 5"):
        trainer.validate(loader_of(), ckpt_path=None)
