"""Traces of a window of steps."""

import json
import logging

import pytest
import torch

from modelzoo_trainer import Callback
from modelzoo_trainer.callbacks.op_profiler import OpProfiler
from modelzoo_trainer.errors import ConfigError


def num_products(path):
    """Return the number of matrix products of the head (8 x 4 by 4 x 1) in a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return sum(event.get("name") == "aten::addmm" for event in events)


class Fails(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.global_step + 1 == self.step:
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("window", "num_steps"), [((), 3), ((2, 3), 2), ((4, 4), 1), ((-1, 1), 1), ((3, 9), 2)]
)
def test_the_trace_has_the_steps_of_the_window(make, batches, tmp_path, window, num_steps):
    profiler = OpProfiler(*window)
    make(profiler).fit(batches)
    assert num_products(tmp_path / "run/chrome_trace.json") == 3 * num_steps
    assert profiler.perf_metrics["profiled_steps"] == num_steps
    assert profiler.perf_metrics["profiled_time"] > 0


def test_each_fit_has_its_own_window(make, batches, tmp_path):
    profiler = OpProfiler()
    trainer = make(profiler)
    trainer.fit(batches)
    (tmp_path / "run/chrome_trace.json").unlink()
    trainer.loop.max_steps = 7
    trainer.fit(batches)
    assert profiler.perf_metrics["profiled_steps"] == 2
    assert num_products(tmp_path / "run/chrome_trace.json") == 6


def test_what_an_error_leaves_is_written(make, batches, tmp_path):
    profiler = OpProfiler(1, 4)
    trainer = make(profiler, Fails(3))
    with pytest.raises(ZeroDivisionError):
        trainer.fit(batches)
    assert num_products(tmp_path / "run/chrome_trace.json") == 6


def test_a_window_that_is_never_reached_is_reported(make, batches, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "modelzoo_trainer"):
        make(OpProfiler(7, 9)).fit(batches)
    assert "no trace of steps 7 to 9: the fit ended at step 4" in caplog.text
    assert not (tmp_path / "run/chrome_trace.json").exists()


def test_a_trace_that_cannot_be_written_does_not_end_the_run(make, batches, tmp_path, caplog):
    (tmp_path / "run/chrome_trace.json/full").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "modelzoo_trainer"):
        trainer = make(OpProfiler())
        trainer.fit(batches)
    assert trainer.global_step == 4
    assert "chrome_trace.json: " in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start_step": 0}, "OpProfiler.start_step: expected -1 or an integer > 0, got 0"),
        ({"end_step": 1.5}, "OpProfiler.end_step: expected -1 or an integer > 0, got 1.5"),
        ({"start_step": True}, "OpProfiler.start_step: .*, got true"),
        ({"start_step": 5, "end_step": 4}, "end_step is 4; it must be at least start_step, 5."),
    ],
)
def test_what_is_no_window_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        OpProfiler(**arguments)


def test_activities_have_no_effect():
    assert OpProfiler().notes == []
    assert "host_activities: no effect" in OpProfiler(host_activities=["H2D"]).notes[0]


def test_a_second_one_is_refused(make):
    with pytest.raises(ConfigError, match="two OpProfiler"):
        make(OpProfiler(1, 2), OpProfiler(4, 5))


def test_another_profiler_continues(make, batches, tmp_path, caplog):
    trainer = make(OpProfiler(2, 3))
    with torch.profiler.profile() as users:
        trainer.fit(batches)
    assert sum(event.name == "aten::addmm" for event in users.events()) == 3 * 4
    assert not (tmp_path / "run/chrome_trace.json").exists()
    assert "another torch profiler is active" in caplog.text
