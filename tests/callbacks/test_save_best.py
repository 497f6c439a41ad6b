"""The best checkpoints: which, when, and which are deleted."""

import logging
import math
import os
import signal
from contextlib import nullcontext

import pytest
import torch

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    CheckpointError,
    ConfigError,
    RollBack,
    TrainingLoop,
    ValidationCallback,
    checkpointing,
)
from modelzoo_trainer.callbacks import EarlyStopping, KeepNCheckpoints, ModelEma, SaveBest


def names(folder):
    return sorted(info.path.name for info in checkpointing.list_checkpoints(folder))


class Score(ValidationCallback):
    """Log given values, one in each validation, under the name `score`."""

    def __init__(self, *values):
        self.values = values

    @property
    def name_scope(self):
        return ""

    @property
    def every_n_vals(self):
        return 1

    @property
    def num_validate_loops(self):
        return 0

    def run_validation(self, trainer, loop_idx, is_last):
        trainer.log_metrics(score=self.values[trainer.global_step - 1])


@pytest.fixture
def run(make, batches):
    """A function that trains one step per value, and returns the trainer."""

    def fit(values, *callbacks, expected=None, **settings):
        plan = {"loop": TrainingLoop(max_steps=len(values), eval_frequency=1)} | settings
        trainer = make(Score(*values), *callbacks, **plan)
        if expected is None:
            trainer.fit(batches, batches[:1])
        else:
            with pytest.raises(expected):
                trainer.fit(batches, batches[:1])
        return trainer

    return fit


# ---- which


@pytest.mark.parametrize(
    ("values", "settings", "kept"),
    [
        ([3.0, 1.0, 2.0], {}, ["best_2"]),
        ([3.0, 1.0, 2.0], {"mode": "max"}, ["best_1"]),
        ([1.0, 2.0, 3.0], {"mode": "max"}, ["best_3"]),
        ([3.0, 1.0, 2.0], {"k": 2}, ["best_2", "best_3"]),
        ([3.0, 1.0, 2.0], {"k": 5}, ["best_1", "best_2", "best_3"]),
        ([2.0, 2.0, 2.0], {}, ["best_1"]),
        ([2.0, 2.0, 2.0], {"k": 2}, ["best_1", "best_2"]),
        ([math.nan, 2.0, -math.inf], {}, ["best_2"]),
        ([2.0, math.nan, math.inf], {"mode": "max"}, ["best_1"]),
        ([math.nan, math.nan], {}, []),
        ([0.0, -0.0], {}, ["best_1"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_the_best_are_kept(run, values, settings, kept, device):
    trainer = run(values, SaveBest("score", **settings), device=device)
    assert names(trainer.model_dir) == kept


def test_they_are_listed_with_their_values_best_first(run):
    best = SaveBest("score", k=2)
    run([3.0, 1.0, 2.0], best)
    assert best.best == [
        {"name": "best_2", "step": 2, "value": 1.0},
        {"name": "best_3", "step": 3, "value": 2.0},
    ]


class Weights(Callback):
    """Record the weights of each step."""

    def __init__(self):
        self.at = {}

    def on_step_boundary(self, trainer):
        self.at[trainer.global_step] = trainer.model.head.weight.detach().clone()


@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("values", [[3.0, 1.0, 2.0], [3.0, 2.0, 1.0]])
@pytest.mark.slow_cases(every=4)
def test_the_weights_are_those_that_had_the_value(run, values, device):
    weights = Weights()
    trainer = run(values, weights, SaveBest("score"), device=device)
    step = values.index(1.0) + 1
    state = checkpointing.load(trainer.model_dir / f"best_{step}")
    assert state["global_step"] == step
    assert torch.equal(state["model"]["head.weight"], weights.at[step])


def test_the_loss_of_a_validation_can_be_named(make, batches):
    loop = TrainingLoop(max_steps=4, eval_frequency=1)
    trainer = make(SaveBest("validate_0/loss", k=9), loop=loop)
    trainer.fit(batches, batches[:1])
    assert names(trainer.model_dir) == ["best_1", "best_2", "best_3", "best_4"]


class LogInBatch(Callback):
    """Log metrics of a training batch in several ways."""

    def on_train_step_end(self, trainer, model, outputs, batch):
        trainer.log_metrics(in_step=outputs["loss"])

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        trainer.log_metrics(at_end=outputs["loss"].detach())
        trainer.read([outputs["loss"].detach()], lambda values: trainer.log_metrics(read=values[0]))


@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("metric", ["loss", "in_step", "at_end", "read"])
@pytest.mark.slow_cases(every=4)
def test_a_metric_of_a_training_batch_is_ignored(make, batches, caplog, device, metric):
    trainer = make(SaveBest(metric, mode="max", k=9), LogInBatch(), device=device, max_steps=3)
    trainer.fit(batches)
    told = [one for one in caplog.messages if "of the weights before that step" in one]
    assert len(told) == 1
    assert names(trainer.model_dir) == []


def test_a_metric_that_is_logged_at_the_step_boundary_is_of_its_weights(make, batches):
    class Evaluate(Callback):
        def on_step_boundary(self, trainer):
            trainer.log_metrics(size=float(trainer.model.head.weight.detach().norm()))

    best = SaveBest("size", k=9)
    trainer = make(best, Evaluate(), max_steps=3)
    trainer.fit(batches)
    assert len(best.best) == 3
    for entry in best.best:
        weight = checkpointing.load(trainer.model_dir / entry["name"])["model"]["head.weight"]
        assert weight.norm().item() == pytest.approx(entry["value"])


class LogLate(Callback):
    """Log a value of the current weights that is read later."""

    def on_step_boundary(self, trainer):
        trainer.log_metrics(size=trainer.model.head.weight.detach().norm())


def test_a_value_that_arrives_when_its_weights_are_gone_is_not_used(make, batches, caplog):
    trainer = make(SaveBest("size", k=9), LogLate(), device="fake", max_steps=6)
    trainer.fit(batches)
    late = [
        record
        for record in caplog.records
        if "after the weights had changed" in record.getMessage()
    ]
    assert trainer.backend.reads.lag > 0
    assert len(late) == 1
    assert names(trainer.model_dir) == ["best_6"]  # that of the last step has been waited for


def test_a_validation_of_swapped_weights_is_ignored(make, batches, caplog):
    ema = ModelEma(0.9, validate=False)

    class Validate(Callback):
        def on_step_boundary(self, trainer):
            with ema.swap():
                trainer.validate(batches[:1], ckpt_path=None)

    trainer = make(SaveBest("validate_0/loss"), ema, Validate())
    trainer.fit(batches)
    assert "the model had the averaged weights" in caplog.text
    assert names(trainer.model_dir) == []


def test_saving_the_best_weights_as_a_checkpoint_of_the_run_warns(run, caplog):
    trainer = run([1.0, 2.0, 3.0], SaveBest("score", load_best=True))
    trainer.save_checkpoint()
    assert "checkpoint_3 has the best weights, of step 1, with the rest" in caplog.text


def test_weights_alone_with_a_metric_of_the_average_warn(make, batches, caplog):
    best = SaveBest("ema/validate_0/loss", checkpoint_states="model")
    make(ModelEma(0.9), best).fit(batches, batches[:1])
    assert "ema/validate_0/loss is a metric of the averaged weights" in caplog.text


def test_a_validation_outside_of_a_fit_is_none(make, batches):
    trainer = make(SaveBest("validate_0/loss"))
    trainer.validate(batches[:1])
    assert names(trainer.model_dir) == []


def test_a_validation_that_was_cut_short_is_none(make, batches):
    class Stop(Callback):
        def on_validate_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.early_exit.stop("enough")

    trainer = make(Stop(), SaveBest("validate_0/loss"))
    trainer.fit(batches, batches[:3])
    assert names(trainer.model_dir) == []


# ---- what


def test_parts_can_be_chosen(run):
    trainer = run([1.0], SaveBest("score", checkpoint_states="model,global_step"))
    state = checkpointing.load(trainer.model_dir / "best_1")
    assert sorted(state) == ["global_step", "model"]


def test_a_part_that_is_not_there_is_named(run):
    run([1.0], SaveBest("score", checkpoint_states="modle"), expected=ConfigError)


def test_a_run_that_starts_from_a_best_one_knows_it(run, make, batches):
    first = run([3.0, 1.0, 2.0], SaveBest("score"))
    best = SaveBest("score")
    loop = TrainingLoop(max_steps=4, eval_frequency=1)
    again = make(Score(0.0, 0.0, 2.0, 2.0), best, loop=loop)
    again.fit(batches, batches[:1], ckpt_path=first.model_dir / "best_2")
    assert again.data.num_batches == 4
    assert best.best == [{"name": "best_2", "step": 2, "value": 1.0}]
    assert names(first.model_dir) == ["best_2"]


def test_its_own_name_can_be_chosen(run):
    trainer = run([1.0], SaveBest("score", checkpoint_name="top-{step}"))
    assert names(trainer.model_dir) == ["top-1"]


def test_it_is_never_what_a_run_resumes_from_by_itself(run):
    run([1.0, 2.0], SaveBest("score"))
    again = run([1.0, 2.0], SaveBest("score"))
    assert again.data.num_batches == 2


def test_the_new_one_is_there_before_the_old_one_goes(run, monkeypatch):
    seen = []
    delete = checkpointing.delete

    def note(path):
        seen.append(names(path.parent))
        delete(path)

    monkeypatch.setattr(checkpointing, "delete", note)
    run([3.0, 2.0, 1.0], SaveBest("score"))
    assert seen == [["best_1", "best_2"], ["best_2", "best_3"]]


def test_a_run_without_values_saves_none(make, batches):
    trainer = make(SaveBest("validate_0/loss"), device="meta")
    trainer.fit(batches, batches[:1])
    assert names(trainer.model_dir) == []


def test_two_of_them_do_not_touch_each_others(run):
    trainer = run([3.0, 1.0, 2.0], SaveBest("score"), SaveBest("score", mode="max"))
    assert names(trainer.model_dir) == ["best_1_2", "best_2"]


def test_what_another_run_has_written_stays(run):
    run([1.0], SaveBest("score"))
    trainer = run([2.0, 1.0], SaveBest("score"))
    assert names(trainer.model_dir) == ["best_1", "best_2"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_goes_together_with_the_runs_own_checkpoints(run, asynchronous):
    checkpoint = Checkpoint(steps=1, asynchronous=asynchronous)
    trainer = run([3.0, 1.0, 2.0], KeepNCheckpoints(1), SaveBest("score"), checkpoint=checkpoint)
    assert names(trainer.model_dir) == ["best_2", "checkpoint_3"]


# ---- disk errors


def test_a_disk_error_is_reported_and_the_run_continues(run, monkeypatch, caplog):
    save = checkpointing.save

    def refuse(path, state, *, step, facts=None):
        if path.name == "best_2":
            raise CheckpointError("no space") from OSError(28, "No space left on device")
        save(path, state, step=step, facts=facts)

    monkeypatch.setattr(checkpointing, "save", refuse)
    best = SaveBest("score")
    trainer = run([3.0, 1.0, 2.0], best)
    assert "failed to write the best checkpoint at step 2: no space" in caplog.text
    assert names(trainer.model_dir) == ["best_3"]
    assert [entry["value"] for entry in best.best] == [2.0]


# ---- after a restart


class Crash(Exception):
    pass


class CrashAt(Callback):
    """Raise after the checkpoint of a step, or (late) after its best checkpoint was written."""

    def __init__(self, step, late=False):
        self.step, self.late = step, late

    def on_step_boundary(self, trainer):
        if trainer.global_step == self.step and not self.late:
            raise Crash

    def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
        if trainer.global_step == self.step and self.late:
            raise Crash


VALUES = [5.0, 4.0, 6.0, 3.0, 3.0, 2.0, 7.0]


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("steps", [[1], [2], [3], [4], [6], [1, 3, 4, 5]], ids=str)
def test_a_run_that_was_broken_keeps_the_same_ones(run, tmp_path, k, late, steps):
    def settings(**more):
        return {"checkpoint": Checkpoint(steps=2), **more}

    whole = SaveBest("score", k=k)
    expected = run(VALUES, whole, **settings(model_dir=tmp_path / "whole"))
    for step in steps:
        run(VALUES, SaveBest("score", k=k), CrashAt(step, late), **settings(expected=Crash))
    best = SaveBest("score", k=k)
    trainer = run(VALUES, best, **settings())
    assert [(entry["step"], entry["value"]) for entry in best.best] == [
        (entry["step"], entry["value"]) for entry in whole.best
    ]
    kept = {entry["name"] for entry in best.best}
    left = set(names(trainer.model_dir)) - set(names(expected.model_dir))
    assert kept <= set(names(trainer.model_dir))
    assert left <= {"best_1", "best_1_2"}  # before the first checkpoint it is another run


def test_one_that_was_written_before_the_restart_is_not_written_again(run):
    checkpoint = {"checkpoint": Checkpoint(steps=2)}
    values = [5.0, 4.0, 3.0, 2.0]
    first = run(values, SaveBest("score"), CrashAt(3, late=True), expected=Crash, **checkpoint)
    before = (first.model_dir / "best_3" / "manifest.json").stat().st_ino
    run(values[:3], SaveBest("score"), checkpoint=Checkpoint(steps=2))
    assert (first.model_dir / "best_3" / "manifest.json").stat().st_ino == before
    assert "best_3_2" not in names(first.model_dir)


def test_one_that_was_damaged_in_between_is_written_again(run):
    values = [5.0, 4.0, 3.0]
    checkpoint = Checkpoint(steps=2)
    first = run(
        values, SaveBest("score"), CrashAt(2, late=True), expected=Crash, checkpoint=checkpoint
    )
    file = next((first.model_dir / "best_2").glob("model*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    best = SaveBest("score")
    run(values[:2], best, checkpoint=Checkpoint(steps=2))
    assert best.best[0]["name"] == "best_2_2"
    assert checkpointing.verify(first.model_dir / "best_2_2") == []


def test_the_last_one_of_a_complete_run_is_known_when_it_continues(run):
    run([3.0, 1.0], SaveBest("score"), checkpoint=Checkpoint(steps=2))
    best = SaveBest("score")
    trainer = run([3.0, 1.0, 2.0, 0.5], best, checkpoint=Checkpoint(steps=2))
    assert [entry["name"] for entry in best.best] == ["best_4"]
    assert names(trainer.model_dir) == ["best_4", "checkpoint_2", "checkpoint_4"]


def test_a_run_that_starts_from_anothers_checkpoint_leaves_its_best_alone(
    run, make, batches, tmp_path
):
    first = run([1.0, 2.0], SaveBest("score"), checkpoint=Checkpoint(steps=2))
    best = SaveBest("score")
    other = make(
        Score(9.0, 8.0, 9.0),
        best,
        model_dir=tmp_path / "other",
        loop=TrainingLoop(max_steps=3, eval_frequency=1),
    )
    other.fit(batches, batches[:1], ckpt_path=first.model_dir / "checkpoint_2")
    assert names(first.model_dir) == ["best_1", "checkpoint_2"]
    assert best.best == [{"name": "best_2", "step": 2, "value": 8.0}]


def test_a_run_that_goes_back_keeps_what_was_best_there(run):
    class GoBack(Callback):
        def __init__(self):
            self.is_done = False

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if trainer.global_step == 4 and not self.is_done:
                self.is_done = True
                raise RollBack("bad", step=4, batches=[], cause=RuntimeError("no way back"))

    best = SaveBest("score")
    trainer = run([5.0, 4.0, 3.0, 2.0], best, GoBack(), checkpoint=Checkpoint(steps=2))
    assert [entry["step"] for entry in best.best] == [4]
    assert names(trainer.model_dir) == ["best_4", "checkpoint_2", "checkpoint_4"]


def test_what_a_restart_has_left_and_nobody_needs_is_gone_at_the_end(run):
    crash = CrashAt(3, late=True)
    checkpoint = Checkpoint(steps=2)
    run([5.0, 4.0, 3.0, 2.0], SaveBest("score"), crash, expected=Crash, checkpoint=checkpoint)
    trainer = run([5.0, 4.0, 6.0, 7.0], SaveBest("score"), checkpoint=Checkpoint(steps=2))
    assert names(trainer.model_dir) == ["best_2", "checkpoint_2", "checkpoint_4"]


# ---- invalid arguments


def test_a_metric_that_never_appears_is_reported_with_the_nearest_name(make, batches, caplog):
    make(SaveBest("validate_0/los")).fit(batches, batches[:1])
    assert "no metric 'validate_0/los' was logged" in caplog.text
    assert "Did you mean 'validate_0/loss'?" in caplog.text


@pytest.mark.parametrize(
    ("watching", "said"), [(SaveBest, "before its first validation"), (EarlyStopping, "")]
)
def test_a_run_that_is_interrupted_before_a_validation_does_not_doubt_the_name(
    make, batches, caplog, watching, said
):
    class Interrupt(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            os.kill(os.getpid(), signal.SIGTERM)

    caplog.set_level(logging.INFO)
    trainer = make(watching("validate_0/f1"), Interrupt())
    trainer.raise_on_interrupt = False
    trainer.fit(batches, batches[:1])
    assert trainer.interrupted == "SIGTERM"
    assert "no metric" not in caplog.text
    assert said in caplog.text


def test_a_metric_that_appears_is_not_missed(make, batches, caplog):
    make(SaveBest("validate_0/loss")).fit(batches, batches[:1])
    assert "was logged" not in caplog.text


def test_a_metric_that_is_not_a_number_is_refused(make, batches):
    class Log(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.log_metrics(weight=model.head.weight)

    with pytest.raises(ConfigError, match="'weight' is a Tensor, which cannot be ranked"):
        make(Log(), SaveBest("weight")).fit(batches)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": ""}, "metric: expected the name of a metric.*, got ''"),
        ({"mode": "least"}, "mode: expected 'min', 'max' or null, got 'least'"),
        ({"k": 0}, "k: expected .*> 0.*, got 0"),
        ({"k": True}, "k: expected .*, got true"),
        ({"checkpoint_name": "best"}, "expected a file name with {step}, once"),
        ({"checkpoint_name": "a/{step}"}, "expected a file name with {step}, once"),
        ({"checkpoint_name": "{step}{step}"}, "expected a file name with {step}, once"),
        ({"checkpoint_name": "{step"}, "expected a file name with {step}, once"),
        ({"checkpoint_states": ""}, "of a checkpoint, such as 'model'"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        SaveBest(**({"metric": "loss"} | arguments))


def test_the_name_of_the_runs_own_checkpoints_is_refused(make):
    with pytest.raises(
        ConfigError, match="'checkpoint_0' would look like one of the run's own checkpoints"
    ):
        make(SaveBest("loss", checkpoint_name="checkpoint_{step}"))


# ---- the best weights at the end


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_the_model_has_the_best_weights_when_a_fit_has_ended(run, device):
    weights, best = Weights(), SaveBest("score", load_best=True)
    trainer = run([3.0, 1.0, 2.0], best, weights, device=device)
    assert torch.equal(trainer.model.head.weight, weights.at[2])
    assert not torch.equal(trainer.model.head.weight, weights.at[3])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_runs_last_checkpoint_has_those_of_the_last_step(run, asynchronous):
    weights, checkpoint = Weights(), Checkpoint(steps=1, asynchronous=asynchronous)
    settings = {"checkpoint": checkpoint}
    trainer = run([3.0, 1.0, 2.0], SaveBest("score", load_best=True), weights, **settings)
    saved = checkpointing.load(trainer.model_dir / "checkpoint_3")["model"]["head.weight"]
    assert torch.equal(saved, weights.at[3])


def test_only_the_weights_are_loaded(run):
    trainer = run([3.0, 1.0, 2.0], SaveBest("score", load_best=True, checkpoint_states="model"))
    assert trainer.global_step == 3


def test_a_run_that_is_complete_has_them_again_when_it_is_started_again(run):
    weights, values = Weights(), [3.0, 1.0, 2.0]
    run(values, SaveBest("score", load_best=True), weights, checkpoint=Checkpoint(steps=1))
    settings = {"checkpoint": Checkpoint(steps=1)}
    trainer = run(values, SaveBest("score", load_best=True), Weights(), **settings)
    assert torch.equal(trainer.model.head.weight, weights.at[2])


def test_an_interrupted_run_keeps_its_last_weights(run):
    class Interrupt(Callback):
        def on_step_boundary(self, trainer):
            if trainer.global_step == 3:
                trainer.early_exit.interrupt("SIGUSR1")

    weights = Weights()
    trainer = run([3.0, 1.0, 2.0, 2.0], SaveBest("score", load_best=True), weights, Interrupt())
    assert torch.equal(trainer.model.head.weight, weights.at[3])


def test_without_a_finite_value_that_is_reported(run, caplog):
    run([math.nan, math.nan], SaveBest("score", load_best=True))
    assert "no best checkpoint to load" in caplog.text


@pytest.mark.parametrize(
    ("metric", "advice"),
    [
        ("validate_0/los", r"Did you mean 'validate_0/loss'\? Logged: loss, validate_0/loss"),
        ("accuracy", r"step 4\. Logged: loss, validate_0/loss"),
    ],
)
def test_a_metric_that_never_comes_is_an_error_if_its_weights_are_to_be_loaded(
    make, batches, metric, advice
):
    trainer = make(SaveBest(metric, load_best=True), checkpoint=Checkpoint(steps=9))
    with pytest.raises(ConfigError, match=rf"{metric}' was never logged .*{advice}"):
        trainer.fit(batches, batches[:1])
    assert names(trainer.model_dir) == ["checkpoint_4"]  # nothing is lost


def test_the_best_of_an_earlier_fit_does_not_undo_a_fit_without_the_metric(make, batches):
    loop = TrainingLoop(num_steps=2, eval_frequency=1)
    trainer = make(SaveBest("validate_0/loss", load_best=True), loop=loop)
    trainer.fit(batches, batches[:1])
    with pytest.raises(ConfigError, match="validate_0/loss' was never logged"):
        trainer.fit(batches)
    assert trainer.global_step == 4


@pytest.mark.parametrize(("step", "is_error"), [(1, False), (3, True)])
def test_it_is_none_in_a_fit_that_was_stopped_before_it_could_come(make, batches, step, is_error):
    class Stop(Callback):
        def on_step_boundary(self, trainer):
            if trainer.global_step == step:
                trainer.early_exit.stop("enough")

    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    trainer = make(SaveBest("nothing", load_best=True), Stop(), loop=loop)
    with pytest.raises(ConfigError) if is_error else nullcontext():
        trainer.fit(batches, batches[:1])
    assert trainer.global_step == step


def test_loading_without_saving_the_weights_is_refused():
    with pytest.raises(ConfigError, match="would have no weights to load"):
        SaveBest("score", checkpoint_states="optimizer", load_best=True)


def test_the_best_average_is_not_taken_for_the_best_weights(make, batches, caplog):
    loop = TrainingLoop(max_steps=2, eval_frequency=1)
    best = SaveBest("ema/validate_0/loss", load_best=True)
    make(ModelEma(0.9), best, loop=loop).fit(batches, batches[:1])
    assert "ema/validate_0/loss is a metric of the averaged weights" in caplog.text


def test_a_line_names_each_new_best_and_none_what_is_deleted(run, caplog):
    caplog.set_level(logging.INFO, logger="modelzoo_trainer")
    run([3.0, 1.0, 2.0], SaveBest("score"))
    lines = [line for line in caplog.messages if line.startswith("New best")]
    assert len(lines) == 2
    assert all("score" in line for line in lines)
    assert not any(line.startswith("Deleted") for line in caplog.messages)
    assert ["best_1" in line for line in lines] == [True, False]
    assert ["best_2" in line for line in lines] == [False, True]


def test_a_prediction_names_the_best_weights_until_others_are_loaded(run, batches, caplog):
    caplog.set_level(logging.INFO, logger="modelzoo_trainer")
    trainer = run(
        [3.0, 1.0, 2.0], SaveBest("score", load_best=True), checkpoint=Checkpoint(steps=3)
    )
    trainer.predict(batches[:1])
    first = next(line for line in caplog.messages if "Predicting" in line)
    assert "best weights (step 2)" in first
    trainer.predict(batches[:1], ckpt_path=trainer.model_dir / "checkpoint_3")
    trainer.predict(batches[:1])
    last = [line for line in caplog.messages if "Predicting" in line][-1]
    assert "best" not in last
    assert "step 3" in last
