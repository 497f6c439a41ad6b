"""Training throughput, with a fake clock."""

import pytest

from modelzoo_trainer import Callback, Checkpoint, CheckpointError, TrainingLoop
from modelzoo_trainer.callbacks import (
    DurationProfiler,
    ExtraCheckpoint,
    RateProfiler,
    SaveBest,
    profiler,
)
from modelzoo_trainer.callbacks.profiler import Stopwatch


class Slow(Callback):
    """A hook that takes a given number of seconds on the fake clock."""

    def __init__(self, monkeypatch, hook, seconds):
        self.seconds, self.hook = seconds, hook
        self.now = 0.0
        monkeypatch.setattr(profiler.time, "perf_counter", lambda: self.now)

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self._wait("first") if trainer.global_step == 0 else self._wait("batch")

    def on_validate_start(self, trainer, model, val_dataloader, loop):
        self._wait("validation")

    def postprocess_checkpoint(self, trainer, state_dict):
        self._wait("checkpoint")

    def _wait(self, hook):
        if hook == self.hook:
            self.now += self.seconds


@pytest.fixture
def slow(monkeypatch):
    """A function from a hook and seconds to a callback."""
    return lambda hook, seconds: Slow(monkeypatch, hook, seconds)


def test_the_rate_is_that_of_the_samples(make, batches, history, slow):
    rates = RateProfiler()
    make(slow("batch", 2), rates, max_steps=6).fit(batches)
    figures = rates.perf_metrics
    assert figures["total_samples"] == 40
    assert figures["total_steps"] == 5
    assert figures["total_time"] == 10
    assert figures["samples_per_sec"] == 4
    assert history.of("avg_samples_per_sec")[-1] == (6, 4)
    assert history.of("avg_steps_per_sec")[-1] == (6, 0.5)


def test_the_local_rate_is_that_since_the_last_log_step(make, batches, history, slow):
    slower = slow("batch", 2)

    class Hurries(Callback):
        def on_step_boundary(self, trainer):
            if trainer.global_step == 6:
                slower.seconds = 1

    make(slower, Hurries(), RateProfiler(), max_steps=7, log_steps=3).fit(batches)
    assert history.of("local_samples_per_sec") == [(3, 4), (6, 4), (7, 8)]


@pytest.mark.parametrize("hook", ["first", "validation", "checkpoint"])
def test_what_is_not_training_does_not_count(make, batches, slow, hook):
    rates = RateProfiler()
    make(
        slow(hook, 3),
        rates,
        loop=TrainingLoop(max_steps=6, eval_frequency=2),
        checkpoint=Checkpoint(steps=3),
    ).fit(batches, batches[:1])
    assert rates.perf_metrics["total_samples"] == 40
    assert rates.perf_metrics["total_time"] == 0


class Best(SaveBest):
    """Keeps a checkpoint of each step."""

    def on_step_boundary(self, trainer):
        super().on_step_boundary(trainer)
        trainer.log_metrics(score=trainer.global_step)


class Nested(Callback):
    """Saves again after the first checkpoint."""

    has_saved = False

    def on_after_save_checkpoint(self, trainer, ckpt_path):
        if not self.has_saved:
            self.has_saved = True
            trainer.save_checkpoint()


@pytest.mark.parametrize(
    "saving",
    [
        ExtraCheckpoint(steps=2, checkpoint_name="extra_{step}"),
        ExtraCheckpoint(steps=2, checkpoint_name="weights_{step}", file_format="safetensors"),
        Best("score", mode="max"),
        Nested(),
    ],
    ids=["extra", "weights", "best", "nested"],
)
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.slow_cases(every=4)
def test_the_clock_continues_after_every_kind_of_save(make, batches, slow, saving, is_first):
    rates, durations = RateProfiler(), DurationProfiler()
    own = [saving, rates, durations] if is_first else [rates, durations, saving]
    make(slow("batch", 2), *own, checkpoint=Checkpoint(steps=3), max_steps=7).fit(batches)
    assert rates.perf_metrics["total_steps"] == 6
    assert rates.perf_metrics["total_time"] == 6 * 2
    assert durations.perf_metrics["time_per_step"] == 2


def test_every_batch_of_an_accumulated_step_counts(make, batches):
    rates = RateProfiler()
    make(rates, loop=TrainingLoop(max_steps=3, grad_accum_steps=2)).fit(batches)
    assert rates.perf_metrics["total_samples"] == 2 * 2 * 8
    assert rates.perf_metrics["total_steps"] == 2


def test_a_second_fit_begins_again(make, batches):
    rates = RateProfiler()
    trainer = make(rates, loop=TrainingLoop(num_steps=3))
    trainer.fit(batches)
    trainer.fit(batches)
    assert rates.perf_metrics["total_steps"] == 2


def test_a_profiler_that_has_seen_nothing_has_a_rate_of_zero():
    assert RateProfiler().perf_metrics["samples_per_sec"] == 0


def test_a_stopwatch_that_was_not_running_is_not_started_by_going_on():
    clock = Stopwatch()
    clock.pause()
    clock.resume()
    assert not clock.is_running


def test_the_clock_continues_after_a_checkpoint_that_was_not_written(
    make, batches, monkeypatch, slow
):
    def refuse(*args, **settings):
        error = CheckpointError("the disk is full")
        raise error from OSError(28, "No space left on device")

    rates = RateProfiler()
    trainer = make(
        rates, slow("batch", 2), checkpoint=Checkpoint(steps=2), max_steps=8, log_steps=3
    )
    monkeypatch.setattr(trainer.checkpoint, "write", refuse)
    with pytest.raises(CheckpointError):  # the last one must succeed
        trainer.fit(batches)
    assert rates.perf_metrics["total_steps"] == 7
    assert rates.perf_metrics["total_time"] == 7 * 2


def test_a_checkpoint_that_is_written_in_the_background_stops_it_no_longer(make, batches, slow):
    rates = RateProfiler()
    checkpoint = Checkpoint(steps=1, asynchronous=True)
    make(rates, slow("batch", 2), checkpoint=checkpoint, max_steps=6).fit(batches)
    assert rates.perf_metrics["total_steps"] == 5
    assert rates.perf_metrics["total_time"] == 5 * 2
