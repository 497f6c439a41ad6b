import time

import pytest

from modelzoo_trainer import Callback, Checkpoint, CheckpointError, TrainingLoop
from modelzoo_trainer.callbacks import RateProfiler
from modelzoo_trainer.callbacks.profiler import Stopwatch


class Slow(Callback):
    def __init__(self, hook, seconds):
        self.seconds, self.hook = seconds, hook

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self._wait("first") if trainer.global_step == 0 else self._wait("batch")

    def on_validate_start(self, trainer, model, val_dataloader, loop):
        self._wait("validation")

    def postprocess_checkpoint(self, trainer, state_dict):
        self._wait("checkpoint")

    def _wait(self, hook):
        if hook == self.hook:
            time.sleep(self.seconds)


def test_the_rate_is_that_of_the_samples(make, batches, history):
    profiler = RateProfiler()
    make(Slow("batch", 0.02), profiler, max_steps=6).fit(batches)
    figures = profiler.perf_metrics
    assert figures["total_samples"] == 40
    assert figures["total_steps"] == 5
    assert figures["total_time"] >= 0.1
    assert figures["samples_per_sec"] == pytest.approx(40 / figures["total_time"])
    assert figures["samples_per_sec"] <= 400
    step, average = history.of("avg_samples_per_sec")[-1]
    assert step == 6
    assert average <= 400
    assert history.of("avg_steps_per_sec")[-1][1] == pytest.approx(average / 8)


def test_the_local_rate_is_that_since_the_last_log_step(make, batches, history):
    make(Slow("batch", 0.02), RateProfiler(), max_steps=7, log_steps=3).fit(batches)
    assert [step for step, _ in history.of("local_samples_per_sec")] == [3, 6, 7]
    assert all(rate <= 400 for _, rate in history.of("local_samples_per_sec"))


@pytest.mark.parametrize("hook", ["first", "validation", "checkpoint"])
def test_what_is_not_training_does_not_count(make, batches, hook):
    profiler = RateProfiler()
    make(
        Slow(hook, 0.3),
        profiler,
        loop=TrainingLoop(max_steps=6, eval_frequency=2),
        checkpoint=Checkpoint(steps=3),
    ).fit(batches, batches[:1])
    assert profiler.perf_metrics["total_samples"] == 40
    assert profiler.perf_metrics["total_time"] < 0.25


def test_every_batch_of_an_accumulated_step_counts(make, batches):
    profiler = RateProfiler()
    make(profiler, loop=TrainingLoop(max_steps=3, grad_accum_steps=2)).fit(batches)
    assert profiler.perf_metrics["total_samples"] == 2 * 2 * 8
    assert profiler.perf_metrics["total_steps"] == 2


def test_a_second_fit_begins_anew(make, batches):
    profiler = RateProfiler()
    trainer = make(profiler, loop=TrainingLoop(num_steps=3))
    trainer.fit(batches)
    trainer.fit(batches)
    assert profiler.perf_metrics["total_steps"] == 2


def test_a_profiler_that_has_seen_nothing_has_a_rate_of_zero():
    assert RateProfiler().perf_metrics["samples_per_sec"] == 0


def test_a_stopwatch_that_was_not_running_is_not_started_by_going_on():
    clock = Stopwatch()
    clock.pause()
    clock.go_on()
    assert not clock.is_running


def test_the_clock_goes_on_after_a_checkpoint_that_was_not_written(make, batches, monkeypatch):
    def refuse(*args, **settings):
        error = CheckpointError("the disk is full")
        raise error from OSError(28, "No space left on device")

    profiler = RateProfiler()
    trainer = make(
        profiler, Slow("batch", 0.02), checkpoint=Checkpoint(steps=2), max_steps=8, log_steps=3
    )
    monkeypatch.setattr(trainer.checkpoint, "write", refuse)
    with pytest.raises(CheckpointError):  # the last one must succeed
        trainer.fit(batches)
    assert profiler.perf_metrics["total_steps"] == 7
    assert profiler.perf_metrics["total_time"] >= 7 * 0.02


def test_a_checkpoint_that_is_written_in_the_background_stops_it_no_longer(make, batches):
    profiler = RateProfiler()
    checkpoint = Checkpoint(steps=1, asynchronous=True)
    make(profiler, Slow("batch", 0.02), checkpoint=checkpoint, max_steps=6).fit(batches)
    assert profiler.perf_metrics["total_steps"] == 5
    assert profiler.perf_metrics["total_time"] >= 5 * 0.02
