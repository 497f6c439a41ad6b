"""What is said of a run's course."""

import logging

import pytest

from modelzoo_trainer import Checkpoint, TrainingLoop
from modelzoo_trainer.callbacks.progress import PrintProgress


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO, logger="modelzoo_trainer")
    return lambda: [r.getMessage() for r in caplog.records if r.name.endswith("progress")]


def test_each_part_of_a_run_has_its_lines(make, batches, messages):
    make(PrintProgress(), loop=TrainingLoop(num_epochs=2)).fit(batches[:3], batches[:1])
    assert messages() == [
        "training begins at step 0, to step 6",
        "epoch 1 of 2 begins",
        "epoch 1 ends at step 3",
        "epoch 2 of 2 begins",
        "epoch 2 ends at step 6",
        "validate_0 begins at step 6",
        "validate_0 ends",
        "training ends at step 6",
    ]


def test_a_pass_that_is_taken_up_again_says_where(make, batches, messages):
    make(max_steps=2, checkpoint=Checkpoint(steps=2), progress="none").fit(batches)
    make(PrintProgress(), max_steps=3).fit(batches)
    assert messages()[:2] == [
        "training begins at step 2, to step 3",
        "epoch 1 begins, resumed at batch 2",
    ]


def test_a_run_without_a_known_end_says_so(make, batches, messages):
    make(PrintProgress(), loop=TrainingLoop(num_epochs=1)).fit(lambda: iter(batches))
    assert messages()[0] == "training begins at step 0, until the data ends"


def test_a_validation_alone_has_its_lines(make, batches, messages):
    make(PrintProgress()).validate(batches[:1])
    assert messages() == ["validate_0 begins at step 0", "validate_0 ends"]


def test_a_validation_that_was_cut_short_says_so(make, batches, messages):
    trainer = make(PrintProgress())
    trainer.early_exit.register(lambda: trainer.val_iterator.num_yielded == 1)
    trainer.validate(batches[:3])
    assert messages()[-1] == "validate_0 ends early"
