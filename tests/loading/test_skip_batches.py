"""Batches that are passed over are not trained on, in this run and in those that resume it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from modelzoo_trainer import Callback, Checkpoint, ConfigError
from modelzoo_trainer.base.devices import make_backend
from modelzoo_trainer.errors import RollBack
from tests.doubles import Recorder, Scale, constant_batches


class Batches(Callback):
    """Writes down the first number of every batch of `Scale`, its pass and its index."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.places: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.values.append(batch.flatten()[0].item())
        data = trainer.data
        self.places.append((data.epoch, data.batch_idx - 1))


class PassOver(Callback):
    """Passes batches over before the fit begins."""

    def __init__(self, *batches: tuple[int, int]) -> None:
        self.batches = batches

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        trainer.data.skip_batches(self.batches)


class WithoutLength:
    def __iter__(self):
        return iter(constant_batches(0, 1, 2, 3))


class Own(WithoutLength):
    """One with a state of its own."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self):
        while self.position < 4:
            self.position += 1
            yield torch.full((2,), self.position - 1.0)
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


LOADERS = {
    "list": lambda: constant_batches(0, 1, 2, 3),
    "loader": lambda: DataLoader(torch.arange(4.0).repeat_interleave(2), batch_size=2),
    "workers": lambda: DataLoader(
        torch.arange(4.0).repeat_interleave(2), batch_size=2, num_workers=1
    ),
    "plain": WithoutLength,
    "stateful": Own,
}
each = pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)


@each
@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.slow_cases(every=4)
def test_a_batch_that_is_passed_over_is_not_trained_on(trainer_of, make, look_ahead) -> None:
    batches, recorder = Batches(), Recorder()
    trainer = trainer_of(
        batches,
        PassOver((0, 1), (1, 0), (1, 3)),
        recorder,
        model=Scale,
        num_epochs=3,
        device=None,
        backend=make_backend("fake", {"look_ahead": look_ahead}),
    )
    trainer.fit(make())
    assert batches.values == [0, 2, 3, 1, 2, 0, 1, 2, 3]
    assert batches.places[:5] == [(0, 0), (0, 2), (0, 3), (1, 1), (1, 2)]
    assert recorder.count("on_train_epoch_end") == 3


@each
@pytest.mark.parametrize("left_out", [[(0, 0), (0, 1), (0, 2), (0, 3)], [(1, i) for i in range(4)]])
@pytest.mark.slow_cases(every=4)
def test_a_pass_of_which_nothing_is_left_is_left_out(trainer_of, make, left_out) -> None:
    batches = Batches()
    trainer = trainer_of(batches, PassOver(*left_out), model=Scale, num_epochs=3)
    trainer.fit(make())
    assert batches.values == [0, 1, 2, 3] * 2
    assert trainer.data.epoch == 3


def test_a_pass_of_which_nothing_is_left_ends_for_interceptors_too(trainer_of) -> None:
    seen: list[str] = []

    class Skip(Callback):
        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            trainer.data.skip_batches([(0, idx) for idx in range(4)])

        def on_train_epoch_start(self, trainer, epoch):
            seen.append(f"start {epoch}")

        def on_train_epoch_end(self, trainer, epoch):
            seen.append(f"end {epoch}")

    pairs = [
        ("pre-epoch", lambda self: seen.append("pre")),
        ("post-epoch", lambda self: seen.append("post")),
    ]
    trainer_of(Skip(), *pairs, num_epochs=2, model=Scale()).fit(WithoutLength())
    assert seen == ["pre", "start 0", "end 0", "post", "pre", "start 1", "end 1", "post"]


def test_a_last_pass_of_which_nothing_is_left_ends_the_run(trainer_of) -> None:
    batches = Batches()
    trainer = trainer_of(
        batches, PassOver(*[(1, idx) for idx in range(4)]), model=Scale, num_epochs=2
    )
    trainer.fit(WithoutLength())
    assert batches.values == [0, 1, 2, 3]
    assert trainer.interrupted is None


def test_steps_per_epoch_counts_batches_that_are_passed_over(trainer_of) -> None:
    batches = Batches()
    trainer_of(batches, PassOver((0, 1)), model=Scale, num_epochs=2, steps_per_epoch=2).fit(
        WithoutLength()
    )
    assert batches.values == [0, 0, 1]


@each
@pytest.mark.slow_cases(every=4)
def test_a_run_that_resumes_passes_them_over_too(trainer_of, make) -> None:
    def trainer(*callbacks: Any, **settings: Any) -> Any:
        return trainer_of(*callbacks, model=Scale, checkpoint=Checkpoint(steps=1), **settings)

    trainer(PassOver((0, 2), (1, 1)), max_steps=2).fit(make())
    batches = Batches()
    again = trainer(batches, num_epochs=2)
    again.fit(make())
    assert batches.values == [3, 0, 2, 3]
    assert again.data.skipped == {(0, 2), (1, 1)}


def test_the_log_says_which_batches_and_samples(trainer_of, caplog) -> None:
    caplog.set_level(logging.INFO)
    trainer_of(PassOver((0, 2), (0, 1)), model=Scale).fit(LOADERS["loader"]())
    assert "Epoch 1: skipping batches 1, 2." in caplog.messages
    assert any("batch 1" in text and "2, 3" in text for text in caplog.messages)


def test_the_log_says_which_batches_where_samples_are_not_known(trainer_of, caplog) -> None:
    caplog.set_level(logging.INFO)
    trainer_of(PassOver((0, 2)), model=Scale).fit(WithoutLength())
    assert "Epoch 1: skipping batch 2." in caplog.messages


def test_messages_count_epochs_from_1(trainer_of, caplog) -> None:
    caplog.set_level(logging.INFO)
    places = [(1, idx) for idx in range(4)]
    trainer = trainer_of(PassOver(*places), model=Scale, num_steps=6)
    trainer.fit(LOADERS["loader"]())
    assert trainer.data.epoch == 2
    found = [text for text in caplog.messages if "rest" in text]
    assert [text.partition(":")[0] for text in found] == ["Epoch 2"]
    trainer.fit(LOADERS["loader"]())  # the first has stopped in the third epoch
    [text] = [text for text in caplog.messages if "mid-epoch" in text]
    assert "epoch 4" in text


class Dislike(Callback):
    """Rolls back, when its step is over, the first time that it meets a value."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)
        self.met: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if batch.flatten()[0].item() in self.values:
            self.met.append((trainer.data.epoch, batch_idx))

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if self.met:
            met, self.met = self.met, []
            raise RollBack("bad", step=trainer.global_step, batches=met, cause=ValueError("bad"))


@each
@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.slow_cases(every=4)
def test_a_roll_back_takes_the_pass_up_where_the_checkpoint_is(
    trainer_of, make, look_ahead
) -> None:
    batches = Batches()
    trainer = trainer_of(
        batches,
        Dislike(2.0),
        model=Scale,
        num_epochs=2,
        checkpoint=Checkpoint(steps=2),
        device=None,
        backend=make_backend("fake", {"look_ahead": look_ahead}),
    )
    trainer.fit(make())
    # Steps 1 and 2, a checkpoint, a bad step, and the second pass likewise.
    assert batches.values == [0, 1, 2, 3, 0, 1, 2, 1, 3]
    assert trainer.data.skipped == {(0, 2), (1, 2)}
    assert trainer.data.epoch == 2


def test_what_was_passed_over_since_the_checkpoint_stays_so(trainer_of) -> None:
    batches = Batches()
    trainer = trainer_of(batches, Dislike(2.0, 3.0), model=Scale, checkpoint=Checkpoint(steps=2))
    trainer.fit(constant_batches(0, 1, 2, 3, 4, 5))
    assert trainer.data.skipped == {(0, 2), (0, 3)}
    assert batches.values == [0, 1, 2, 3, 4, 5]


def test_workers_end_when_the_run_is_taken_back(trainer_of) -> None:
    alive = []

    class Workers(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            positioned = trainer.data._data._source._positioned
            alive.append(tuple(worker.pid for worker in positioned._iterator.workers))

    trainer_of(
        Workers(), Dislike(2.0), model=Scale, checkpoint=Checkpoint(steps=1), num_epochs=1
    ).fit(LOADERS["workers"]())
    assert len(set(alive)) == 2


def test_an_iterator_cannot_go_back(trainer_of) -> None:
    trainer = trainer_of(Dislike(2.0), model=Scale, checkpoint=Checkpoint(steps=1), max_steps=4)
    with pytest.raises(ConfigError, match=r" batch 2 of .* train_dataloader is an iterator"):
        trainer.fit(iter(constant_batches(0, 1, 2, 3, 4, 5)))


def test_a_callable_makes_an_iterator_anew_to_go_back(trainer_of) -> None:
    batches = Batches()
    trainer = trainer_of(
        batches, Dislike(2.0), model=Scale, checkpoint=Checkpoint(steps=1), max_steps=4
    )
    trainer.fit(lambda: iter(constant_batches(0, 1, 2, 3, 4, 5)))
    assert batches.values == [0, 1, 2, 3, 4]
