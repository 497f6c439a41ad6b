"""Hints about callbacks that watch a validation metric which is logged once or never."""

from __future__ import annotations

import logging

import pytest

from modelzoo_trainer import Callback, Checkpoint
from modelzoo_trainer.callbacks import EarlyStopping, RunHistory, SaveBest, StepBasedEvaluation
from modelzoo_trainer.core.parts.run_hints import hints_of
from tests.doubles import tiny_batches

LOSS = "validate_0/loss"


@pytest.fixture
def hints(trainer_of, caplog):
    """Return a function that trains on six batches, and returns the hints about a metric."""
    caplog.set_level(logging.INFO)

    def of(*callbacks, validates=True, **settings):
        trainer = trainer_of(*callbacks, **settings)
        trainer.fit(tiny_batches(6), tiny_batches(1) if validates else None)
        texts = " ".join(" ".join(caplog.text.split()).split("hint: ")[1:])
        caplog.clear()
        return texts

    return of


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"num_epochs": 2}, ["only once", 'to "epoch"']),
        ({"max_steps": 12}, ["only once", 'to "epoch"']),
        ({"max_steps": 6}, ["only once", "a smaller number of steps"]),
        ({"num_epochs": 1, "eval_frequency": "epoch"}, ["only once", "a smaller number of steps"]),
        ({"max_steps": 12, "eval_frequency": 12}, ["only once", 'to "epoch"']),
        (
            {"max_steps": 12, "eval_frequency": None},
            ["no effect", 'to "epoch"'],
        ),
        ({"max_steps": 12, "validates": False}, ["no effect", "Pass val_dataloader"]),
    ],
)
@pytest.mark.parametrize("watching", [EarlyStopping, SaveBest])
@pytest.mark.slow_cases(every=4)
def test_a_metric_that_is_logged_once_or_never_is_worth_a_hint(hints, watching, settings, facts):
    text = hints(watching(LOSS), **settings)
    assert all(fact in text for fact in [f"{watching.__name__}: ", LOSS, *facts])


@pytest.mark.parametrize(
    ("callbacks", "settings"),
    [
        ([EarlyStopping(LOSS)], {"num_epochs": 2, "eval_frequency": "epoch"}),
        ([SaveBest(LOSS)], {"max_steps": 6, "eval_frequency": 5}),
        ([SaveBest(LOSS)], {"max_steps": 6, "eval_frequency": 0.5}),
        ([EarlyStopping(LOSS), StepBasedEvaluation(2)], {"max_steps": 6}),
        ([EarlyStopping("loss")], {"max_steps": 6}),
        ([RunHistory()], {"max_steps": 6}),
    ],
)
def test_no_hint_where_there_are_several_values(hints, callbacks, settings):
    assert hints(*callbacks, **settings) == ""


def test_no_hint_where_a_fit_continues_with_the_best_of_earlier_ones(hints, trainer_of):
    trainer = trainer_of(SaveBest(LOSS), num_steps=2, checkpoint=Checkpoint(steps=2))
    trainer.fit(tiny_batches(6), tiny_batches(1))
    trainer.fit(tiny_batches(6), tiny_batches(1))
    assert hints_of(trainer, tiny_batches(1)) == ()


def test_no_hint_beside_a_callback_of_the_user(hints):
    class Validates(Callback):
        def on_train_epoch_end(self, trainer, epoch):
            trainer.validate(tiny_batches(1), ckpt_path=None)

    assert hints(EarlyStopping(LOSS), Validates(), num_epochs=2) == ""


def test_no_hint_where_the_state_is_kept_for_several_fits(hints):
    assert hints(EarlyStopping(LOSS, reset_on_fit=False), num_epochs=1) == ""


def test_a_best_value_of_0_is_one(trainer_of):
    trainer = trainer_of(early := EarlyStopping(LOSS), num_steps=2)
    trainer.fit(tiny_batches(6), tiny_batches(1))
    assert hints_of(trainer, None) == ()
    early.best = None
    assert hints_of(trainer, None) != ()
    early.best = 0.0
    assert hints_of(trainer, None) == ()


@pytest.mark.parametrize(
    ("first", "second", "is_hinted"),
    [
        (5, {"num_steps": 10, "eval_frequency": 10}, False),  # validates at 10 and 15
        (5, {"num_steps": 5, "eval_frequency": 10}, True),  # at 10
        (5, {"num_steps": 4, "eval_frequency": 10}, True),  # at 9
        (2, {"num_steps": 6, "eval_frequency": "epoch"}, True),  # at 8, as a new epoch starts
        (6, {"num_steps": 6, "eval_frequency": "epoch"}, True),  # at 12
    ],
)
def test_the_validations_of_a_later_fit_are_counted_from_its_start(
    trainer_of, caplog, first, second, is_hinted
):
    caplog.set_level(logging.INFO)
    trainer = trainer_of(num_steps=first)
    trainer.fit(tiny_batches(6), tiny_batches(1))
    trainer.add_callback(EarlyStopping(LOSS))
    trainer.loop.num_steps = second["num_steps"]
    trainer.loop.eval_frequency = second["eval_frequency"]
    trainer.fit(tiny_batches(6), tiny_batches(1))
    assert ("only once" in caplog.text) == is_hinted


def test_no_hint_where_a_run_goes_on_in_the_middle_of_an_epoch(trainer_of, caplog):
    caplog.set_level(logging.INFO)
    trainer_of(num_steps=2, checkpoint=Checkpoint(steps=2)).fit(tiny_batches(6))
    early = EarlyStopping(LOSS)
    trainer = trainer_of(early, num_steps=6, eval_frequency="epoch")
    trainer.fit(tiny_batches(6), tiny_batches(1))
    assert trainer.global_step == 8
    assert caplog.text.count("validate_0: loss") == 2  # at steps 6 and 8
    assert "only once" not in caplog.text
