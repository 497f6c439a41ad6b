"""Hints about callbacks that watch a validation metric which is logged once or never."""

from __future__ import annotations

import logging

import pytest

from modelzoo_trainer import Checkpoint
from modelzoo_trainer.callbacks import EarlyStopping, RunHistory, SaveBest, StepBasedEvaluation
from modelzoo_trainer.optim.run_hints import hints_of
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
