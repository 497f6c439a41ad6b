"""Validations within training: when, under which name, how long, and without side effects."""

import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, ConfigError, TrainingLoop
from modelzoo_trainer.callbacks.limit_batches import LimitEvalSteps
from modelzoo_trainer.callbacks.model_ema import ModelEma
from modelzoo_trainer.callbacks.step_based_evaluation import StepBasedEvaluation

INTERMEDIATE = "validate_0/intermediate/loss"


def steps(history, name):
    return [step for step, _ in history.of(name)]


class Watch(Callback):
    """Record the training modes, and the number of batches of each validation."""

    def __init__(self):
        self.modes = []
        self.lengths = []

    def on_train_step_start(self, trainer, model, batch):
        self.modes.append(model.training)

    def on_validate_start(self, trainer, model, val_dataloader, loop):
        self.lengths.append(0)

    def on_validate_step_start(self, trainer, model, batch):
        self.lengths[-1] += 1
        assert not model.training


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_they_come_every_so_many_steps_under_their_own_name(make, batches, history, device):
    watch = Watch()
    loop = TrainingLoop(max_steps=7)
    trainer = make(StepBasedEvaluation(2), watch, loop=loop, device=device)
    trainer.fit(batches, batches[:2])
    assert steps(history, INTERMEDIATE) == [2, 4, 6]
    assert steps(history, "validate_0/loss") == [7]
    assert watch.modes == [True] * 7
    assert loop.eval_frequency == 1.0


def test_training_is_what_it_is_without_them(make, batches, history, tmp_path):
    plain = make(model_dir=tmp_path / "plain", loop=TrainingLoop(num_epochs=1))
    plain.fit(batches)
    before = history.of("loss")
    history.lines.clear()
    trainer = make(StepBasedEvaluation(3), loop=TrainingLoop(num_epochs=1, grad_accum_steps=1))
    trainer.fit(batches, batches[:2])
    assert history.of("loss") == before
    assert torch.equal(trainer.model.head.weight, plain.model.head.weight)


def test_those_that_the_loop_has_keep_their_names(make, batches, history):
    loop = TrainingLoop(max_steps=7, eval_frequency=4)
    make(StepBasedEvaluation(2), loop=loop).fit(batches, batches[:1])
    assert steps(history, INTERMEDIATE) == [2, 6]
    assert steps(history, "validate_0/loss") == [4, 7]
    assert loop.eval_frequency == 4


def test_averages_are_validated_with_those_of_the_loop_alone(make, batches, history):
    loop = TrainingLoop(max_steps=7, eval_frequency=4)
    make(StepBasedEvaluation(2), ModelEma(0.9), loop=loop).fit(batches, batches[:1])
    assert steps(history, INTERMEDIATE) == [2, 6]
    assert steps(history, "ema/validate_0/loss") == [4, 7]
    assert not history.of("ema/validate_0/intermediate/loss")


@pytest.mark.parametrize("callbacks", [[], [StepBasedEvaluation(2)]], ids=["alone", "added"])
def test_averages_count_the_validations_of_the_loop_alone(make, batches, history, callbacks):
    loop = TrainingLoop(max_steps=18, eval_frequency=4)
    ema = ModelEma(0.9, every_n_vals=2)
    trainer = make(ema, *callbacks, loop=loop)
    trainer.fit(batches, batches[:1])
    assert steps(history, "ema/validate_0/loss") == [8, 16, 18]
    loop.max_steps = 30
    trainer.fit(batches, batches[:1])  # which counts anew, from step 20
    assert steps(history, "ema/validate_0/loss") == [8, 16, 18, 24, 30]


def test_a_name_scope_is_ones_own_or_none(make, batches, history):
    make(StepBasedEvaluation(2, "brief")).fit(batches, batches[:1])
    make(StepBasedEvaluation(2, "")).fit(batches, batches[:1])
    assert steps(history, "validate_0/brief/loss") == [2]
    assert steps(history, "validate_0/loss") == [4, 2, 4]


@pytest.mark.parametrize("frequency", [3, 0.5])
def test_a_frequency_that_does_not_fit_is_refused(make, batches, frequency):
    trainer = make(StepBasedEvaluation(2), loop=TrainingLoop(max_steps=6, eval_frequency=frequency))
    with pytest.raises(
        ConfigError, match=f"loop.eval_frequency is {frequency}. .*multiple of every_n_steps"
    ):
        trainer.fit(batches, batches[:1])


def test_without_data_that_is_reported(make, batches, caplog):
    make(StepBasedEvaluation(2)).fit(batches)
    assert "the fit has no val_dataloader" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "every_n_steps: expected .*, got 0"), ((1, "a/b"), "name_scope: .*'/', got 'a/b'")],
)
def test_an_argument_that_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        StepBasedEvaluation(*arguments)


class Crash(Exception):
    pass


class CrashIn(Callback):
    """Raise in the validation after a step."""

    def __init__(self, step):
        self.step = step

    def on_validate_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            raise Crash


def test_one_that_was_cut_short_is_taken_up_by_the_run_that_resumes(make, batches, history):
    settings = {"max_steps": 5, "checkpoint": Checkpoint(steps=1)}
    with pytest.raises(Crash):
        make(StepBasedEvaluation(2), CrashIn(2), **settings).fit(batches, batches[:1])
    assert steps(history, INTERMEDIATE) == []
    trainer = make(StepBasedEvaluation(2), max_steps=5)
    trainer.fit(batches, batches[:1])
    assert trainer.data.num_batches == 5
    assert steps(history, "loss") == [1, 2, 3, 4, 5]
    assert steps(history, INTERMEDIATE) == [2, 4]
    assert steps(history, "validate_0/loss") == [5]


# ---- their length


def lengths(make, batches, *callbacks, **settings):
    watch = Watch()
    trainer = make(*callbacks, watch, **settings)
    trainer.fit(batches, batches[:5])
    return watch.lengths


def test_intermediate_ones_are_as_long_as_they_may_be(make, batches):
    callbacks = [LimitEvalSteps(2), StepBasedEvaluation(2)]
    loop = TrainingLoop(max_steps=6, eval_frequency=4)
    assert lengths(make, batches, *callbacks, loop=loop) == [2, 5, 5]
    assert loop.val_loop.eval_steps is None


def test_without_step_based_ones_all_but_the_last_are_intermediate(make, batches):
    loop = TrainingLoop(max_steps=6, eval_frequency=2)
    assert lengths(make, batches, LimitEvalSteps(2), loop=loop) == [2, 2, 5]


def test_or_all_are_limited(make, batches):
    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    limit = LimitEvalSteps(2, intermediate_only=False)
    assert lengths(make, batches, limit, loop=loop) == [2, 2]


def test_a_limit_that_is_less_already_stays(make, batches):
    loop = TrainingLoop(max_steps=4, eval_frequency=2, eval_steps=1)
    limit = LimitEvalSteps(2, intermediate_only=False)
    assert lengths(make, batches, limit, loop=loop) == [1, 1]


@pytest.mark.parametrize(("intermediate_only", "length"), [(True, 5), (False, 2)])
def test_a_validation_outside_a_fit_is_limited_only_if_all_are(
    make, batches, intermediate_only, length
):
    watch = Watch()
    make(LimitEvalSteps(2, intermediate_only), watch).validate(batches[:5])
    assert watch.lengths == [length]


def test_a_limit_that_is_not_positive_is_refused():
    with pytest.raises(ConfigError, match=r"LimitEvalSteps\.num_eval_steps: expected .*, got 0"):
        LimitEvalSteps(0)


@pytest.mark.parametrize("arguments", [(None,), (2, 5), (2, None)])
def test_an_argument_of_another_type_is_refused(arguments):
    with pytest.raises(
        ConfigError, match=r"StepBasedEvaluation\.(every_n_steps|name_scope): expected"
    ):
        StepBasedEvaluation(*arguments)
