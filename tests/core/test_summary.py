"""What runs come to: their last and best metrics, their checkpoints, what has stopped them."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from modelzoo_trainer import Callback, Checkpoint, ConfigError, StopTraining, Trainer
from modelzoo_trainer.callbacks import EarlyStopping, KeepNCheckpoints, SaveBest
from modelzoo_trainer.core.parts.results import Best, RunResult
from tests.doubles import Scale, TinyModel, constant_batches, tiny_batches


class Reports(Callback):
    """Logs given values of a metric after each validation's stage, one each."""

    def __init__(self, name: str, *values: object) -> None:
        self.name = name
        self.values = list(values)

    def on_validate_end(self, trainer, model, loop):
        trainer.log_metrics_dict({self.name: self.values.pop(0)})


class Steps(Callback):
    """Records the steps of metrics."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_metrics(self, trainer, metrics, step):
        self.steps.append(step)


def scored(trainer_of, name: str, *values: object, **settings: object) -> RunResult:
    trainer = trainer_of(
        Reports(name, *values), max_steps=len(values), eval_frequency=1, **settings
    )
    return trainer.fit(tiny_batches(), tiny_batches(1))


def test_a_fit_returns_its_last_metrics_steps_and_epochs(trainer_of) -> None:
    trainer = trainer_of(num_epochs=2)
    result = trainer.fit(tiny_batches(3), tiny_batches(1))
    assert result is trainer.result
    assert result.metrics.keys() >= {"loss", "validate_0/loss"}
    assert (result.method, result.steps, result.global_step, result.epochs) == ("fit", 6, 6, 2)
    assert (result.stopped_by, result.checkpoints) == (None, ())
    assert result.model_dir == trainer.model_dir


@pytest.mark.parametrize(
    ("name", "values", "best"),
    [
        ("accuracy", (0.1, 0.9, 0.9, 0.5), Best(0.9, 2)),  # of equal ones the first
        ("perplexity", (math.nan, 3.0, 2.0, 4.0), Best(2.0, 3)),
        ("error", (math.inf, 3.0, "x", True), Best(3.0, 2)),
        ("num_words", (1, 2), None),
    ],
)
def test_the_best_follows_the_direction_of_the_name(trainer_of, name, values, best) -> None:
    result = scored(trainer_of, name, *values)
    assert result.best.get(f"validate_0/{name}") == best


def test_a_callback_says_which_direction_is_better(trainer_of) -> None:
    stopping = EarlyStopping("validate_0/score", patience=9, mode="min")
    trainer = trainer_of(Reports("score", 2, 1, 3), stopping, max_steps=3, eval_frequency=1)
    assert trainer.fit(tiny_batches(), tiny_batches(1)).best["validate_0/score"] == Best(1, 2)


def test_the_best_value_of_a_resumed_run_is_said_to_be_only_of_this_call(
    trainer_of, tmp_path, caplog
) -> None:
    caplog.set_level(logging.INFO)

    def fit(num, *scores):
        settings = {"checkpoint": Checkpoint(steps=1), "model_dir": tmp_path, "eval_frequency": 1}
        best = SaveBest("validate_0/error", k=9)
        trainer = trainer_of(best, Reports("error", *scores), max_steps=num, **settings)
        return trainer.fit(tiny_batches(4), tiny_batches(1))

    first = fit(2, 1.0, 5.0)
    assert (first.first_step, first.best["validate_0/error"]) == (0, Best(1.0, 1))
    assert "since" not in repr(first) + caplog.text
    resumed = fit(4, 5.0, 3.0, 4.0)  # validates step 2 again
    assert (resumed.first_step, resumed.best["validate_0/error"]) == (2, Best(3.0, 3))
    assert "best validate_0/error since step 2 3 at 3" in repr(resumed)
    assert "best since 2" in caplog.text
    assert resumed.best_checkpoint == tmp_path / "best_1"  # of the whole run


def test_the_loss_of_a_single_batch_is_never_best(trainer_of) -> None:
    assert trainer_of(max_steps=3).fit(tiny_batches()).best == {}


def test_validate_returns_its_own_metrics_without_a_prefix(trainer_of) -> None:
    trainer = trainer_of()
    first, second = tiny_batches(2, seed=3), tiny_batches(2, seed=4)
    results = [trainer.validate(first), trainer.validate(second)]
    assert [sorted(result.metrics) for result in results] == [["loss"], ["loss"]]
    assert results[0].metrics != results[1].metrics
    assert trainer.result is results[1]


def test_the_result_of_a_test_names_the_method(trainer_of) -> None:
    trainer = trainer_of(max_steps=2)
    trainer.fit(tiny_batches())
    result = trainer.test(tiny_batches(2))
    assert (result.method, list(result.metrics)) == ("test", ["loss"])
    assert repr(result).startswith("RunResult(test to step 2,")
    with trainer.name_scope("test"):
        assert trainer.validate(tiny_batches(1)).method == "validate"


def test_the_result_of_predict_names_the_method(trainer_of) -> None:
    class Doubled(Scale):
        def forward(self, batch):
            return {"twice": 2 * batch}

    trainer = trainer_of(model=Doubled)
    trainer.predict(constant_batches(1))
    assert trainer.result.method == "predict"


def test_validate_all_has_the_metrics_of_each_checkpoint(trainer_of) -> None:
    trainer = trainer_of(max_steps=2, checkpoint=Checkpoint(steps=1))
    paths = trainer.fit(tiny_batches()).checkpoints
    assert [path.name for path in paths] == ["checkpoint_1", "checkpoint_2"]
    result = trainer.validate_all(tiny_batches(1), paths)
    assert list(result.per_checkpoint) == list(paths)
    losses = [found["validate_0/loss"] for found in result.per_checkpoint.values()]
    assert losses[0] != losses[1]
    assert result.metrics["validate_0/loss"] == losses[1]


def test_checkpoints_that_were_deleted_are_left_out(trainer_of) -> None:
    keep = KeepNCheckpoints(1)
    result = trainer_of(keep, max_steps=3, checkpoint=Checkpoint(steps=1)).fit(tiny_batches())
    assert [path.name for path in result.checkpoints] == ["checkpoint_3"]


@pytest.mark.parametrize("num", [1, 4])
def test_the_last_checkpoint_is_the_one_to_resume_from(trainer_of, caplog, num) -> None:
    caplog.set_level(logging.INFO)
    trainer = trainer_of(
        SaveBest("validate_0/score", mode="max", k=9),
        Reports("score", *range(num)),
        max_steps=num,
        eval_frequency=1,
        checkpoint=Checkpoint(steps=2),
    )
    result = trainer.fit(tiny_batches(), tiny_batches(1))
    path = trainer.model_dir / f"checkpoint_{num}"
    assert result.last_checkpoint == path
    assert f"last checkpoint {path}" in repr(result)
    assert result.checkpoints[-1].name == f"best_{num}"
    if num > 3:  # too many to list
        assert f"the last is {path.name}" in caplog.text.replace("\n               ", " ")


def test_without_own_checkpoints_there_is_no_last_one_to_resume_from(trainer_of) -> None:
    result = trainer_of(SaveBest("validate_0/loss"), max_steps=2).fit(
        tiny_batches(), tiny_batches(1)
    )
    assert result.last_checkpoint is None
    assert "best_2" in repr(result)


def test_the_best_checkpoint_is_among_them(trainer_of) -> None:
    best = SaveBest("validate_0/loss", mode="min")
    result = trainer_of(best, max_steps=2).fit(tiny_batches(), tiny_batches(1))
    assert len(result.checkpoints) == 1


@pytest.mark.parametrize(
    ("values", "load_best", "step"),
    [((3.0, 1.0, 2.0), True, 2), ((3.0, 2.0, 1.0), True, None), ((3.0, 1.0, 2.0), False, None)],
    ids=["earlier", "last", "not loaded"],
)
def test_the_step_of_the_best_weights_is_told_if_it_is_not_the_last(
    trainer_of, caplog, values, load_best, step
) -> None:
    caplog.set_level(logging.INFO)
    best = SaveBest("validate_0/score", load_best=load_best)
    reports = Reports("score", *values, 0.5)
    trainer = trainer_of(best, reports, Steps(), max_steps=3, eval_frequency=1)
    result = trainer.fit(tiny_batches(), tiny_batches(1))
    assert (result.weights_step, result.global_step) == (step, 3)
    assert ("weights of step 2" in repr(result)) == (step is not None)
    [end] = [text for text in caplog.messages if text.startswith("Finished")]
    rows = [line.split() for line in end.splitlines() if "weights:" in line]
    assert rows == ([] if step is None else [["weights:", "of", "step", "2", "(best)"]])
    assert trainer.validate(tiny_batches(1), ckpt_path=None).weights_step == step
    history = trainer.get_callback(Steps)
    assert history.steps[-1] == (step or 3)


def test_what_has_stopped_a_fit_is_told(trainer_of) -> None:
    class Stop(Callback):
        def on_step_boundary(self, trainer):
            raise StopTraining("enough")

    assert trainer_of(Stop(), max_steps=3).fit(tiny_batches()).stopped_by == "enough"


def test_a_stop_in_a_validation_has_a_result_all_the_same(trainer_of) -> None:
    class Stop(Scale):
        def forward(self, batch):
            raise StopTraining("enough")

    result = trainer_of(model=Stop).validate(constant_batches(1))
    assert (result.method, result.stopped_by) == ("validate", "enough")


def test_a_signal_leaves_the_result_with_the_trainer(trainer_of) -> None:
    class Interrupted(Callback):
        def on_step_boundary(self, trainer):
            trainer.early_exit.interrupt("SIGINT")

    trainer = trainer_of(Interrupted(), max_steps=3)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(tiny_batches())
    assert (trainer.result.stopped_by, trainer.result.steps) == ("SIGINT", 1)


def test_an_error_leaves_the_result_with_the_trainer(trainer_of) -> None:
    class Fail(Callback):
        def on_step_boundary(self, trainer):
            if trainer.global_step == 2:
                raise RuntimeError("broken")

    trainer = trainer_of(Fail(), max_steps=3)
    with pytest.raises(RuntimeError):
        trainer.fit(tiny_batches())
    assert trainer.result.stopped_by == "RuntimeError: broken"
    assert trainer.result.steps == 2


def test_a_result_is_shown_in_one_line() -> None:
    best = {"validate_0/loss": Best(0.25, 3)}
    metrics = {"lr/0": 0.1, "loss": 0.5, "validate_0/loss": 0.75, "norm": 3.0}
    result = RunResult(
        method="fit", metrics=metrics, best=best, steps=4, global_step=6, stopped_by="SIGINT"
    )
    text = repr(result)
    assert "\n" not in text
    facts = ("4 steps", "step 6", "loss 0.5", "validate_0/loss 0.75", "0.25 at 3", "SIGINT")
    assert [fact for fact in facts if fact not in text] == []
    assert "lr" not in text


def test_a_function_after_fit_takes_no_result(trainer_of) -> None:
    seen: list[int] = []
    trainer = trainer_of(("post-fit", lambda self: seen.append(self.global_step)), num_steps=2)
    assert trainer.fit(tiny_batches()).steps == 2
    assert seen == [2]


def test_a_trainer_says_what_it_is(trainer_of) -> None:
    trainer = trainer_of(num_steps=2)
    trainer.fit(tiny_batches())
    text = repr(trainer)
    facts = ("TinyModel", "21 parameters", "cpu", "SGD", "step 2", str(trainer.model_dir))
    assert [fact for fact in facts if fact not in text] == []


def test_a_trainer_that_is_not_there_yet_can_be_shown() -> None:
    assert repr(Trainer.__new__(Trainer)) == "Trainer()"


def test_another_kind_of_progress_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"progress is 'bars'.*'bar', 'lines', 'none'"):
        Trainer(model=TinyModel, model_dir=tmp_path, progress="bars")  # type: ignore[arg-type]


def test_best_values_of_steps_that_are_taken_back_do_not_count(trainer_of) -> None:
    from modelzoo_trainer.core.summary import _Record

    record = _Record("fit")
    for step, value in ((1, 3.0), (2, 2.0), (3, 1.0)):
        record.note_best({"validate_0/loss": value}, step, {}, has_new=step == 1)
    record.go_back_to(2)
    assert record.bests["validate_0/loss"][-1] == Best(2.0, 2)
