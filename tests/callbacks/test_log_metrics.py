"""Which metrics are logged when, without losing any."""

import logging

import pytest

from modelzoo_trainer import Callback, Checkpoint, Logging, TrainingLoop, ValidationCallback
from modelzoo_trainer.callbacks.log_metrics import LogMetrics


class Told(LogMetrics):
    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, trainer, metrics):
        self.lines.append((trainer.global_step, dict(metrics)))

    @property
    def names(self):
        return [(step, sorted(metrics)) for step, metrics in self.lines]


class Own(ValidationCallback):
    name_scope = "own"
    every_n_vals = 1
    num_validate_loops = 0

    def run_validation(self, trainer, loop_idx, is_last):
        trainer.log_metrics(score=trainer.global_step)


class LateTraining(Callback):
    def on_train_epoch_end(self, trainer, epoch):
        trainer.log_metrics(train_or_not=epoch)


class LateValidation(Callback):
    def on_validate_end(self, trainer, model, loop):
        trainer.log_metrics(retrained=1.0)


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_training_comes_with_the_epoch_and_validation_with_its_end(make, batches, device, history):
    told = Told()
    trainer = make(told, loop=TrainingLoop(num_epochs=2), device=device)
    trainer.fit(batches[:3], batches[:1])
    assert told.names == [(3, ["loss"]), (6, ["loss"]), (6, ["validate_0/loss"])]
    losses = [value for _, value in history.of("loss")]
    assert [metrics["loss"] for _, metrics in told.lines[:2]] == [losses[2], losses[5]]


def test_of_a_pass_that_is_not_complete_it_comes_with_the_stage(make, batches):
    told = Told()
    make(told, loop=TrainingLoop(max_steps=4, eval_frequency=2)).fit(batches, batches[:1])
    assert told.names == [
        (2, ["loss"]),
        (2, ["validate_0/loss"]),
        (4, ["loss"]),
        (4, ["validate_0/loss"]),
    ]


@pytest.mark.parametrize("is_first", [True, False])
def test_what_callbacks_behind_it_log_is_not_missed(make, batches, is_first):
    told = Told()
    others = [LateTraining(), LateValidation(), Own()]
    callbacks = [told, *others] if is_first else [*others, told]
    make(*callbacks, loop=TrainingLoop(num_epochs=1)).fit(batches[:2], batches[:1])
    names = [name for _, metrics in told.names for name in metrics]
    assert sorted(names) == [
        "loss",
        "own/score",
        "train_or_not",
        "validate_0/loss",
        "validate_0/retrained",
    ]
    of_training = [metrics for _, metrics in told.names if "loss" in metrics]
    assert set(of_training[0]) <= {"loss", "train_or_not"}


def test_nothing_is_reported_twice(make, batches):
    told = Told()
    trainer = make(told, logging=Logging(log_steps=0), loop=TrainingLoop(num_epochs=2))
    trainer.fit(batches[:2])
    assert told.names == [(4, ["loss"])]


def test_a_validation_alone_is_reported(make, batches):
    told = Told()
    make(told).validate(batches[:1])
    assert told.names == [(0, ["validate_0/loss"])]


class Crash(Exception):
    pass


class CrashAt(Callback):
    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.global_step == 2:
            raise Crash


def test_a_run_that_resumes_tells_what_was_logged_before(make, batches, history):
    def settings():
        return {
            "log_steps": 2,
            "loop": TrainingLoop(num_epochs=2, eval_frequency=None),
            "checkpoint": Checkpoint(steps=2),
        }

    with pytest.raises(Crash):
        make(LogMetrics(), CrashAt(), **settings()).fit(batches[:3])
    told = type("LogMetrics", (Told,), {})()
    make(told, **settings()).fit(batches[:3])
    assert told.names == [(3, ["loss"]), (6, ["loss"])]
    assert [metrics["loss"] for _, metrics in told.lines][:1] == [history.of("loss")[0][1]]


def test_the_log_has_them_in_a_line(make, batches, caplog):
    caplog.set_level(logging.INFO, logger="modelzoo_trainer")
    make(LogMetrics(), max_steps=2).fit(batches, batches[:1])
    lines = [r.getMessage() for r in caplog.records if r.name == "modelzoo_trainer.metrics"]
    assert [line.rpartition(" ")[0] for line in lines] == [
        "step 2 | loss",
        "step 2 | validate_0/loss",
    ]
