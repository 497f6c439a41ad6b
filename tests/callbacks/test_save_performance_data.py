"""The file with the measurements of profilers."""

import json
import logging

import pytest

from modelzoo_trainer import Callback, TrainingLoop
from modelzoo_trainer.callbacks.profiler import Profiler, RateProfiler
from modelzoo_trainer.callbacks.save_performance_data import SavePerformanceData


class Odd(Profiler):
    @property
    def perf_metrics(self):
        return {"rate": float("nan"), "peak": float("inf"), "steps": 3, "name": None}


def read(trainer):
    return json.loads((trainer.artifact_dir / "performance.json").read_text())


def test_each_profiler_has_its_figures(make, batches):
    rates = RateProfiler()
    trainer = make(Odd(), rates, Odd(), SavePerformanceData())
    trainer.fit(batches)
    found = read(trainer)
    assert list(found) == ["Odd", "RateProfiler", "Odd_2"]
    assert found["Odd"] == {"rate": None, "peak": None, "steps": 3, "name": None}
    assert found["RateProfiler"] == rates.perf_metrics
    assert found["RateProfiler"]["total_steps"] == 3


def test_it_is_there_after_a_validation(make, batches):
    trainer = make(Odd(), SavePerformanceData())
    trainer.validate(batches)
    assert read(trainer)["Odd"]["steps"] == 3


def test_it_is_rewritten_after_each_stage(make, batches):
    steps = []

    class Look(Callback):
        def on_validate_start(self, trainer, model, val_dataloader, loop):
            steps.append(read(trainer)["RateProfiler"]["total_steps"])

    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    trainer = make(RateProfiler(), SavePerformanceData(), Look(), loop=loop)
    trainer.fit(batches, batches[:1])
    assert steps == [1, 3]


def test_there_is_none_after_an_error(make, batches):
    class Fails(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            raise ZeroDivisionError

    trainer = make(Odd(), SavePerformanceData(), Fails())
    with pytest.raises(ZeroDivisionError):
        trainer.fit(batches)
    assert not (trainer.artifact_dir / "performance.json").exists()


def test_without_profilers_that_is_reported(make, batches, caplog):
    with caplog.at_level(logging.WARNING, "modelzoo_trainer"):
        trainer = make(SavePerformanceData())
    assert "callback RateProfiler" in caplog.text
    trainer.fit(batches)
    assert read(trainer) == {}


def test_a_file_that_cannot_be_written_is_reported_once(make, batches, caplog):
    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    trainer = make(Odd(), SavePerformanceData(), loop=loop)
    (trainer.artifact_dir / "performance.json").mkdir()
    with caplog.at_level(logging.WARNING, "modelzoo_trainer"):
        trainer.fit(batches, batches[:1])
    assert trainer.global_step == 4
    assert caplog.text.count("performance.json: ") == 1
