"""What training does to numbers: nothing that was not asked for, and what was."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import torch

from modelzoo_trainer import Checkpoint, Logging, MixedPrecision
from modelzoo_trainer.callbacks import default_callbacks
from tests.doubles import History, Scale, TinyModel, differing, tiny_batches, weights_of


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def dropping() -> TinyModel:
    return TinyModel(dropout=0.5)


def test_validations_between_steps_change_nothing_in_training(trainer_of, tmp_path) -> None:
    often = trainer_of(model=dropping, optimizer=adamw, num_epochs=2, eval_frequency=1)
    often.fit(tiny_batches(5), [iter_of(2), iter_of(3)])
    never = trainer_of(model=dropping, optimizer=adamw, num_epochs=2, model_dir=tmp_path / "never")
    never.fit(tiny_batches(5))
    assert differing(weights_of(often), weights_of(never)) == []


class iter_of:  # reads like a function
    """A validation set that draws random numbers of its own."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self):
        torch.rand(5)
        return iter(tiny_batches(self.num))


def test_callbacks_logging_and_checkpoints_change_nothing_in_training(trainer_of, tmp_path) -> None:
    busy = trainer_of(
        *default_callbacks(),
        model=dropping,
        optimizer=adamw,
        loggers=History(),
        checkpoint=Checkpoint(steps=2),
        logging=Logging(log_steps=1),
    )
    busy.fit(tiny_batches(5))
    plain = trainer_of(
        model=dropping,
        optimizer=adamw,
        model_dir=tmp_path / "plain",
        logging=Logging(log_steps=0),
    )
    plain.fit(tiny_batches(5))
    assert differing(weights_of(busy), weights_of(plain)) == []


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_another_device_draws_the_same_numbers(trainer_of, tmp_path, device) -> None:
    trainer = trainer_of(model=dropping, optimizer=adamw, device=device)
    trainer.fit(tiny_batches(5))
    host = trainer_of(model=dropping, optimizer=adamw, model_dir=tmp_path / "host")
    host.fit(tiny_batches(5))
    assert differing(weights_of(trainer), weights_of(host)) == []


@pytest.mark.parametrize("precision", [None, MixedPrecision()], ids=["full", "bfloat16"])
def test_one_batch_is_learnt_by_heart(trainer_of, precision) -> None:
    history = History()
    trainer_of(optimizer=adamw, loggers=history, precision=precision, num_epochs=400).fit(
        tiny_batches(1)
    )
    losses = [value for _, value in history.of("loss")]
    assert losses[0] > 0.1
    assert losses[-1] < 1e-3


def test_the_loss_of_a_validation_is_a_mean_over_samples(trainer_of) -> None:
    history = History()
    trainer_of(model=Scale, loggers=history).validate(
        [torch.full((4,), 1.0), torch.full((4,), 2.0), torch.full((1,), 15.0)]
    )
    assert history.lines == [(0, {"validate_0/loss": 3.0})]


def test_the_loss_of_a_validation_is_not_divided_by_grad_accum_steps(trainer_of) -> None:
    history = History()
    trainer_of(
        model=Scale,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        loggers=history,
        grad_accum_steps=2,
    ).fit([torch.ones(2)] * 2, [torch.full((4,), 3.0)])
    assert history.of("validate_0/loss") == [(1, 3.0)]


def test_the_loss_of_a_validation_is_a_mean_over_items_if_they_are_told(trainer_of) -> None:
    class Told(Scale):
        def forward(self, batch):
            return {"loss": super().forward(batch), "num_items": int(batch[0])}

    history = History()
    trainer_of(model=Told, loggers=history).validate([torch.full((2,), 1.0), torch.full((2,), 3.0)])
    assert history.of("validate_0/loss") == [(0, 2.5)]


@pytest.mark.slow
def test_memory_does_not_grow_with_steps(trainer_of) -> None:
    batches = tiny_batches(20)
    trainer = trainer_of(
        *default_callbacks(), max_steps=2100, num_epochs=None, logging=Logging(log_steps=10)
    )
    trainer.loop.max_steps = 100
    trainer.fit(batches, tiny_batches(1))
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    trainer.loop.max_steps = 2100
    trainer.fit(batches, tiny_batches(1))
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert trainer.global_step == 2100
    assert grown < 200_000
