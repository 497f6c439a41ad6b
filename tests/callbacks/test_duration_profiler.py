"""The estimated time remaining, with a fake clock."""

import pytest

from modelzoo_trainer import Callback, Checkpoint, TrainingLoop
from modelzoo_trainer.callbacks import profiler
from modelzoo_trainer.callbacks.profiler import DurationProfiler, MeanDuration
from modelzoo_trainer.errors import StopTraining


class Clock(Callback):
    """A step takes 1 s, the first one 100 s; a validation 10 s, a checkpoint 5 s."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.is_first = True
        monkeypatch.setattr(profiler.time, "perf_counter", lambda: self.now)

    def on_train_step_start(self, trainer, model, batch):
        self.now += 100 if self.is_first else 1
        self.is_first = False

    def on_validate_start(self, trainer, model, val_dataloader, loop):
        self.now += 10

    def postprocess_checkpoint(self, trainer, state_dict):
        self.now += 5


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_of_training_alone_it_is_the_steps(make, batches, history, clock):
    watch = DurationProfiler()
    make(clock, watch, max_steps=5).fit(batches)
    assert history.of("time_remaining") == [(2, 3), (3, 2), (4, 1), (5, 0)]
    assert history.of("loop_time_remaining") == [(2, 3), (3, 2), (4, 1), (5, 0)]
    assert watch.perf_metrics == {
        "total_time": 104,
        "setup_time": 100,
        "time_per_step": 1,
        "time_per_validation": 0,
        "time_per_checkpoint": 0,
    }


def test_validations_and_checkpoints_count_when_there_was_one(make, batches, history, clock):
    watch = DurationProfiler()
    loop = TrainingLoop(max_steps=7, eval_frequency=3)
    make(clock, watch, loop=loop, checkpoint=Checkpoint(steps=2)).fit(batches, batches[:1])
    assert watch.perf_metrics["time_per_validation"] == 10
    assert watch.perf_metrics["time_per_checkpoint"] == 5
    # Step 2: before the first checkpoint. Step 3: checkpoints at 4, 6 and 7, no validation yet.
    # Step 4: validations at 6 and 7, and the checkpoints at 4, 6 and 7 ... Step 7: the last ones.
    assert history.of("time_remaining") == [
        (2, 5),
        (3, 4 + 15),
        (4, 3 + 20 + 15),
        (5, 2 + 20 + 10),
        (6, 1 + 20 + 10),
        (7, 10 + 5),
    ]
    assert history.of("loop_time_remaining")[1:4] == [(3, 0), (4, 2 + 10), (5, 1 + 5)]


def test_a_resumed_run_counts_from_where_it_is(make, batches, history, clock):
    saves = Checkpoint(steps=4)
    make(clock, max_steps=4, checkpoint=saves).fit(batches)
    history.lines.clear()
    make(clock, DurationProfiler(), max_steps=9, checkpoint=Checkpoint(steps=4)).fit(batches)
    assert history.of("time_remaining")[0] == (6, 3)


def test_a_window_of_accumulation_is_one_step(make, batches, history, clock):
    loop = TrainingLoop(max_steps=4, grad_accum_steps=2)
    make(clock, DurationProfiler(), loop=loop).fit(batches)
    assert history.of("time_remaining") == [(2, 4), (3, 2), (4, 0)]


def test_of_a_fit_without_a_known_end_nothing_is_logged(make, batches, history, clock):
    class Stops(Callback):
        def on_step_boundary(self, trainer):
            if trainer.global_step == 4:
                raise StopTraining

    loop = TrainingLoop(num_epochs=1)
    make(clock, DurationProfiler(), Stops(), loop=loop).fit(lambda: iter(batches))
    assert history.of("time_remaining") == []
    assert history.of("loop_time_remaining") == []


def test_a_fit_that_fails_before_it_starts_shows_its_own_error(make, batches, clock):
    class Fails(Callback):
        def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
            raise ZeroDivisionError

    watch = DurationProfiler()
    with pytest.raises(ZeroDivisionError):
        make(watch, Fails()).fit(batches)
    assert watch.perf_metrics["time_per_step"] == 0


def test_the_mean_is_that_of_what_has_ended(clock):
    mean = MeanDuration()
    mean.end()
    assert mean.value == 0
    for seconds in (2, 4):
        mean.begin()
        clock.now += seconds
        mean.end()
    mean.begin()
    assert mean.value == 3
