"""The Model Zoo's loggers: what arrives where."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from modelzoo_trainer import Callback, Logger, Logging, callbacks, loggers
from tests.doubles import History, TinyModel, tiny_batches


class Extra(Callback):
    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        trainer.log_metrics(text="some words", weight=model.head.weight.detach().clone())


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def test_c_logger__has_to_have_log_metrics(trainer_of):
    class Own(Logger):
        def __init__(self):
            self.seen = []

        def log_metrics(self, metrics, step):
            self.seen.append((step, sorted(metrics)))

    own = Own()
    trainer_of(loggers=own, logging=Logging(log_steps=2), max_steps=3).fit(tiny_batches())
    assert own.name == "Own"
    assert own.seen == [(2, ["loss"]), (3, ["loss"])]
    with pytest.raises(TypeError, match="abstract"):
        type("Bare", (Logger,), {})()


def test_metrics_go_to_the_loggers_that_they_are_for(trainer_of):
    class Own(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.log_metrics_dict({"mine": 1}, dest="Second")

    class Second(History): ...

    first, second = History(), Second()
    trainer_of(Own(), loggers=[first, second], num_steps=1).fit(tiny_batches())
    assert first.of("mine") == []
    assert second.of("mine") == [(1, 1)]
    assert first.of("loss") == second.of("loss")


def test_c_progress_logger__says_step_loss_and_rate(trainer_of, caplog):
    caplog.set_level(logging.INFO, "modelzoo_trainer.progress")
    watched = [callbacks.RateProfiler(), callbacks.LogOptimizerParamGroup("lr")]
    history = History()
    progress = loggers.ProgressLogger(interval_s=0.0)
    trainer_of(*watched, loggers=[progress, history], max_steps=3).fit(tiny_batches())
    said = [record.getMessage() for record in caplog.records if record.name.endswith("progress")]
    lines = [line for line in said if line.startswith("train step")]
    assert len(lines) == 3
    for line, (step, loss) in zip(lines, history.of("loss"), strict=True):
        assert line.startswith(f"train step {step}/3 | epoch 1 | loss {loss:.5f} | lr 0.1 | ")
    assert said[-1].startswith("Finished at step 3, 1 epoch completed: 3 steps in ")


def test_c_progress_logger__a_validation_is_told_without_its_tensors(trainer_of, caplog):
    caplog.set_level(logging.INFO, "modelzoo_trainer.progress")
    history = History()
    trainer = trainer_of(
        callbacks.LogInputSummaries(), loggers=[loggers.ProgressLogger(), history], num_steps=1
    )
    trainer.fit(tiny_batches(), tiny_batches(1))
    ((_, loss),) = history.of("validate_0/loss")
    assert len(history.of("validate_0/input.0")) == 1
    assert f"validate_0: loss {loss:.5f} at step 1" in caplog.messages


def test_c_tensor_board_logger__writes_scalars_texts_and_tensors(trainer_of):
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    history = History()
    trainer = trainer_of(Extra(), loggers=[loggers.TensorBoardLogger(), history])
    trainer.fit(tiny_batches(), tiny_batches(1))
    trainer.close()
    events = loading.EventAccumulator(str(trainer.model_dir / "events"))
    events.Reload()
    for name in ("loss", "validate_0/loss"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(step, pytest.approx(loss)) for step, loss in history.of(name)]
    assert events.Tags()["histograms"] == ["weight"]
    assert events.Tags()["tensors"] == ["text/text_summary"]


def test_c_tensor_board_logger__older_folders_on_request(trainer_of):
    pytest.importorskip("tensorboard")
    logger = loggers.TensorBoardLogger(legacy_event_dirs=True)
    trainer = trainer_of(loggers=logger)
    trainer.fit(tiny_batches(), tiny_batches(1))
    trainer.close()
    assert list((trainer.model_dir / "train").iterdir())
    assert list((trainer.model_dir / "eval").iterdir())


@pytest.mark.slow
def test_c_wandb_logger__is_one_run_that_has_the_metrics(trainer_of, monkeypatch):
    wandb = pytest.importorskip("wandb")
    sent, given = [], {}

    class Run:
        id, resumed, starting_step = "abc", False, 0

        def __init__(self):
            self.summary = {}

        def log(self, points, step):
            sent.append((step, points))

        def finish(self):
            sent.append("finished")

    run = Run()
    monkeypatch.setattr(wandb, "init", lambda **arguments: given.update(arguments) or run)
    logger = loggers.WandbLogger(project="p", group="g", run_name="n", job_type="j", tags=["t"])
    history = History()
    trainer = trainer_of(Extra(), loggers=[logger, history], max_steps=3)
    trainer.fit(tiny_batches())
    trainer.close()
    expected = {"project": "p", "group": "g", "name": "n", "job_type": "j", "tags": ["t"]}
    assert {key: given[key] for key in expected} == expected
    points = [(step, values["loss"]) for step, values in sent[:-1] if "loss" in values]
    assert points == history.of("loss")
    assert sent[-1] == "finished"
    assert run.summary == {"text": "some words"}
    assert logger.state_dict() == {"run_id": "abc"}


def test_c_telemetry_logger__takes_what_is_for_it_alone(trainer_of, caplog):
    taken = []

    class Watched(loggers.TelemetryLogger):
        def log_metrics(self, metrics, step):
            taken.append((step, metrics))
            super().log_metrics(metrics, step)

    class Own(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.log_metrics_dict({"mine": 1}, dest="Watched")

    with caplog.at_level(logging.INFO, "modelzoo_trainer"):
        trainer_of(Own(), loggers=Watched(), num_steps=1).fit(tiny_batches())
    assert taken == [(1, {"mine": 1})]
    assert "TelemetryLogger drops" in caplog.text


def test_a_model_without_a_loss_is_told(trainer_of):
    class Lossless(TinyModel):
        def forward(self, batch):
            return {"logits": torch.zeros(())}

    with pytest.raises((KeyError, TypeError, ValueError, RuntimeError), match="loss"):
        trainer_of(model=Lossless).fit(tiny_batches())
