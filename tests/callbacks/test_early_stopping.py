"""Early stopping, and its state after a restart."""

import logging
import math

import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, ConfigError, TrainingLoop, ValidationCallback
from modelzoo_trainer.callbacks import SaveBest
from modelzoo_trainer.callbacks.early_stopping import EarlyStopping


class Score(ValidationCallback):
    """Log given values, one in each validation, under the name `score`."""

    name_scope = ""
    every_n_vals = 1
    num_validate_loops = 0

    def __init__(self, *values):
        self.values = values

    def run_validation(self, trainer, loop_idx, is_last):
        trainer.log_metrics(score=self.values[trainer.global_step - 1])


@pytest.fixture
def run(make, batches):
    """A function that trains one step per value, and returns the trainer."""

    def fit(values, *callbacks, **settings):
        plan = {"loop": TrainingLoop(max_steps=len(values), eval_frequency=1)} | settings
        trainer = make(Score(*values), *callbacks, **plan)
        trainer.fit(batches, batches[:1])
        return trainer

    return fit


@pytest.mark.parametrize(
    ("values", "settings", "end"),
    [
        ([5, 4, 3, 2, 1, 0], {"patience": 1}, 6),
        ([1, 2, 3, 4], {"patience": 1}, 2),
        ([1, 2, 3, 4], {"patience": 3}, 4),
        ([1, 2, 0, 2, 2, 2], {"patience": 2}, 5),
        ([1, 1, 1], {"patience": 1}, 2),
        ([1, 2, 1, 1], {"patience": 1, "mode": "max"}, 3),
        ([1.0, 0.95, 0.5, 0.45], {"patience": 1, "min_delta": 0.1}, 2),
        ([1.0, 0.5, 0.25, 0.0], {"patience": 1, "min_delta": 0.25}, 3),
        ([1.0, math.nan, 0.5, 0.6], {"patience": 2}, 4),
        ([1.0, math.nan, -math.inf, 0.6], {"patience": 2}, 3),
        ([math.nan, math.nan, 1.0], {"patience": 2}, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_the_run_ends_when_the_metric_no_longer_improves(run, values, settings, end, device):
    assert run(values, EarlyStopping("score", **settings), device=device).global_step == end


def test_it_says_why(run):
    trainer = run([1.0, 2.0, 3.0, 4.0], EarlyStopping("score", patience=2))
    assert trainer.early_exit.reason == (
        "EarlyStopping: score has not improved for 2 values (best: 1 at step 1)"
    )


def test_one_value_is_not_several(run):
    reason = run([1.0, 2.0, 3.0], EarlyStopping("score", patience=1)).early_exit.reason
    assert " 1 value " in reason
    assert "values" not in reason


def test_a_metric_of_training_ends_it_at_its_step(make, batches):
    class Log(Callback):
        def on_train_step_end(self, trainer, model, outputs, batch):
            trainer.log_metrics(score=1.0)

    trainer = make(Log(), EarlyStopping("score", patience=2), max_steps=9)
    trainer.fit(batches)
    assert trainer.global_step == 3


@pytest.mark.parametrize("is_first", [True, False])
def test_what_others_do_with_the_last_value_does_not_depend_on_the_order(run, is_first):
    pair = [EarlyStopping("score", patience=1, min_delta=0.5), SaveBest("score")]
    run([2.0, 1.9], *(pair if is_first else pair[::-1]))
    assert pair[1].best[0]["step"] == 2


def test_the_validation_whose_value_ends_the_run_is_complete(make, batches, history):
    loop = TrainingLoop(max_steps=4, eval_frequency=1)
    stop = EarlyStopping("validate_0/loss", patience=1, min_delta=1e9)
    trainer = make(stop, loop=loop)
    trainer.fit(batches, [lambda: batches[:2], lambda: batches[2:3]])
    assert trainer.global_step == 2
    assert [step for step, _ in history.of("validate_1/loss")] == [1, 2]


# ---- another fit, and a restart


def test_each_fit_begins_again(run, batches):
    stop = EarlyStopping("score", patience=2)
    trainer = run([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], stop)
    assert trainer.global_step == 3
    trainer.fit(batches, batches[:1], ckpt_path=None)
    assert trainer.global_step == 6
    assert stop.best == 4.0


def test_or_resumes_from_the_one_before(run, batches):
    stop = EarlyStopping("score", patience=2, reset_on_fit=False)
    trainer = run([1.0, 2.0, 3.0, 4.0], stop)
    trainer.fit(batches, batches[:1], ckpt_path=None)
    assert trainer.global_step == 3


class Killed(Exception):
    pass


class KillAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
        if trainer.global_step == self.step:
            raise Killed


@pytest.mark.parametrize("step", [2, 3, 4])
@pytest.mark.slow_cases(every=4)
def test_a_run_that_was_killed_ends_where_the_unbroken_one_does(run, make, batches, tmp_path, step):
    values = [3.0, 1.0, 2.0, 2.0, 2.0, 0.0]
    whole = run(values, EarlyStopping("score"), model_dir=tmp_path / "whole")
    with pytest.raises(Killed):
        run(values, EarlyStopping("score"), KillAt(step), checkpoint=Checkpoint(steps=1))
    stop, begins = EarlyStopping("score"), []

    class Begin(Callback):
        def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
            begins.append(trainer.global_step)

    trainer = run(values, stop, Begin(), checkpoint=Checkpoint(steps=1))
    assert begins == [step]
    assert trainer.global_step == whole.global_step == 5
    assert (stop.best, stop.best_step, stop.num_waited) == (1.0, 2, 3)
    assert torch.equal(trainer.model.head.weight, whole.model.head.weight)


def test_one_that_has_ended_so_ends_at_once_when_it_is_started_again(run):
    values = [1.0, 2.0, 3.0, 4.0, 5.0]

    def again(patience):
        stop = EarlyStopping("score", patience=patience)
        trainer = run(values, stop, checkpoint=Checkpoint(steps=1))
        return trainer.global_step, stop.num_waited

    assert again(2) == (3, 2)
    assert again(2) == (3, 2)
    assert again(3) == (4, 3)


def test_a_run_that_begins_with_anothers_checkpoint_does_not_wait_for_its_best(
    run, make, batches, tmp_path
):
    first = run([1.0, 2.0], EarlyStopping("score", patience=1), checkpoint=Checkpoint(steps=1))
    stop = EarlyStopping("score", patience=1)
    loop = TrainingLoop(max_steps=5, eval_frequency=1)
    other = make(Score(0, 10.0, 9.0, 8.0, 7.0), stop, loop=loop, model_dir=tmp_path / "other")
    other.fit(batches, batches[:1], ckpt_path=first.model_dir / "checkpoint_2")
    assert other.global_step == 5
    assert stop.best == 7.0


# ---- invalid arguments


def test_a_metric_that_never_comes_is_reported_with_the_nearest_name(make, batches, caplog):
    make(EarlyStopping("validate_0/los")).fit(batches, batches[:1])
    assert "no metric 'validate_0/los' was logged" in caplog.text
    assert "Did you mean 'validate_0/loss'?" in caplog.text


def test_one_that_has_not_come_with_the_first_validation_is_reported_then_and_once(
    make, batches, caplog
):
    loop = TrainingLoop(max_steps=6, eval_frequency=2)

    class Lines(Callback):
        def __init__(self):
            self.told = []

        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            self.told.append(
                caplog.text.count("EarlyStopping: no metric 'validate_0/los' was logged so far.")
            )

    lines = Lines()
    make(EarlyStopping("validate_0/los"), lines, loop=loop).fit(batches, batches[:1])
    assert lines.told == [0, 1, 1]
    assert "Did you mean 'validate_0/loss'?" in caplog.text


def test_one_that_comes_is_not_missed(make, batches, caplog):
    make(EarlyStopping("validate_0/loss")).fit(batches, batches[:1])
    assert "was logged" not in caplog.text


def test_one_that_is_not_a_number_is_refused(make, batches):
    class Log(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.log_metrics(weight=model.head.weight)

    with pytest.raises(ConfigError, match=r"EarlyStopping.metric: 'weight' is a Tensor"):
        make(Log(), EarlyStopping("weight")).fit(batches)


def test_each_value_is_logged_if_verbose(run, caplog):
    caplog.set_level(logging.INFO, logger="modelzoo_trainer")
    run([2.0, 1.0, 1.5], EarlyStopping("score", verbose=True))
    assert "score improved to 1 at step 2" in caplog.text
    assert (
        "score did not improve: 1.5 at step 3 (best: 1 at step 2; patience: 1 of 3)" in caplog.text
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": ""}, "EarlyStopping.metric: expected the name of a metric.*, got ''"),
        ({"mode": "least"}, "EarlyStopping.mode: expected 'min', 'max' or null, got 'least'"),
        ({"patience": 0}, "EarlyStopping.patience: expected .*> 0.*, got 0"),
        ({"min_delta": -1.0}, "EarlyStopping.min_delta: expected .*>= 0.*, got -1.0"),
        ({"min_delta": math.nan}, "EarlyStopping.min_delta: expected .*, got nan"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        EarlyStopping(**({"metric": "loss"} | arguments))
