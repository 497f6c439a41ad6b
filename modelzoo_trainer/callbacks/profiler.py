"""Profilers: training throughput, duration and time remaining."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Loader, Outputs, StateDict
from modelzoo_trainer.loading.batches import batch_size_of

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class Profiler(Callback, ABC):
    """Base class of profilers; `SavePerformanceData` writes their measurements."""

    @property
    @abstractmethod
    def perf_metrics(self) -> dict[str, Any]:
        """The measurements since the fit began: numbers by name."""


class TrainingProfiler(Profiler):
    """Base class of profilers that measure training only.

    The clock starts at the end of the first step, which is excluded, and is paused during
    validations and checkpoints.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset at the beginning of a fit."""
        self._clock = Stopwatch()
        self._asked_at = 0.0
        self._asked_for = 0

    def counts(self, trainer: Trainer) -> bool:
        """Return whether to count the batch that ends; start the clock if it is the first."""
        if self._clock.is_paused:  # by a save that had no end
            self.saving_end()
        if self._clock.has_run:
            return True
        if trainer.should_run_optimizer_step:
            self._clock.start()
        return False

    def rate_since(self, total: int, elapsed: float) -> float | None:
        """Return the increase per second since the last call; None = no time has passed.

        `elapsed`: the seconds on the clock.
        """
        since = elapsed - self._asked_at
        if since <= 0:
            return None
        rate = (total - self._asked_for) / since
        self._asked_at, self._asked_for = elapsed, total
        return rate

    # ---- the clock

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self.reset()
        stack.callback(self._clock.stop)

    @override
    def on_train_start(
        self,
        trainer: Trainer,
        model: Module,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        if self._clock.has_run:
            self._clock.start()

    @override
    def on_train_end(self, trainer: Trainer, model: Module, loop: Any, loop_idx: int) -> None:
        self._clock.stop()

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        if self._clock.is_running:
            self._clock.stop()
            stack.callback(self._clock.start)

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        self._clock.pause()

    def saving_end(self) -> None:
        """Continue after a checkpoint: written, failed, or being written in the background."""
        self._clock.resume()


class Stopwatch:
    """Total seconds of the intervals in which it runs."""

    def __init__(self) -> None:
        self.has_run = False
        self._elapsed = 0.0
        self._started: float | None = None
        self.is_paused = False
        """Whether `pause` has stopped it."""

    @property
    def is_running(self) -> bool:
        """Whether it is running."""
        return self._started is not None

    def start(self) -> None:
        """Start or continue."""
        self.has_run = True
        if self._started is None:
            self._started = time.perf_counter()

    def stop(self) -> None:
        """Stop. Idempotent."""
        self._elapsed = self.elapsed()
        self._started = None

    def pause(self) -> None:
        """Pause until `resume`, if it is running."""
        self.is_paused = self.is_paused or self.is_running
        self.stop()

    def resume(self) -> None:
        """Continue if `pause` has stopped it."""
        if self.is_paused:
            self.is_paused = False
            self.start()

    def elapsed(self) -> float:
        """Return the total seconds so far."""
        if self._started is None:
            return self._elapsed
        return self._elapsed + time.perf_counter() - self._started


class RateProfiler(TrainingProfiler):
    """Log training throughput in samples and steps per second, on log steps.

    The clock starts at the end of the first step, which is excluded, and is paused during
    validations and checkpoints. Samples are counted over all processes, measured on the main
    process.

    Metrics:
        local_samples_per_sec: Samples per second since the last log step.
        avg_samples_per_sec: Samples per second since the fit began.
        avg_steps_per_sec: Steps per second since the fit began.
    """

    @override
    def reset(self) -> None:
        super().reset()
        self._num_samples = 0
        self._num_steps = 0
        self._local_rate = 0.0

    @property
    @override
    def perf_metrics(self) -> dict[str, float]:
        """The measurements since the fit began.

        `total_samples`, `total_steps` and `total_time` (in seconds) without the first step; `rate`,
        since the last log step; `global_rate` and `samples_per_sec`, over all steps.
        """
        elapsed = self._clock.elapsed()
        rate = self._num_samples / elapsed if elapsed else 0.0
        return {
            "total_samples": self._num_samples,
            "total_steps": self._num_steps,
            "total_time": elapsed,
            "rate": self._local_rate,
            "global_rate": rate,
            "samples_per_sec": rate,
        }

    # ---- counting

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        if not self.counts(trainer):
            return
        self._num_samples += batch_size_of(batch) * trainer.backend.comm.data_shard[1]
        if trainer.should_run_optimizer_step:
            self._num_steps += 1
            if trainer.is_log_step:
                self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        elapsed = self._clock.elapsed()
        rate = self.rate_since(self._num_samples, elapsed)
        if rate is None:
            return
        self._local_rate = rate
        trainer.log_metrics_dict(
            {
                "local_samples_per_sec": rate,
                "avg_samples_per_sec": self._num_samples / elapsed,
                "avg_steps_per_sec": self._num_steps / elapsed,
            }
        )


class DurationProfiler(TrainingProfiler):
    """Log the estimated time remaining of the current train stage and of the fit, on log steps.

    What remains is counted from `global_step`, so also in a resumed run: steps, the validations
    after train stages, and the checkpoints that are due by steps. The duration of each is its mean
    in this fit, without the first step. Validations or checkpoints that have not occurred yet count
    as 0 s: until then, the estimate is a lower bound. Nothing is logged for a fit of unknown
    length.

    Metrics:
        loop_time_remaining: Seconds until the end of the train stage.
        time_remaining: Seconds until the end of the fit.
    """

    @override
    def reset(self) -> None:
        super().reset()
        self._begun = time.perf_counter()
        self._setup_s: float | None = None
        self._total_s: float | None = None
        self._num_steps = 0
        self._validations = MeanDuration()
        self._checkpoints = MeanDuration()

    @property
    @override
    def perf_metrics(self) -> dict[str, float]:
        """Durations in the fit, in seconds.

        `total_time`; `setup_time`, until the end of the first step; and the means `time_per_step`,
        `time_per_validation` (of all dataloaders) and `time_per_checkpoint` (while training was
        blocked), which are 0 if there were none.
        """
        total = time.perf_counter() - self._begun if self._total_s is None else self._total_s
        return {
            "total_time": total,
            "setup_time": self._setup_s or 0.0,
            "time_per_step": self._step_s(),
            "time_per_validation": self._validations.value,
            "time_per_checkpoint": self._checkpoints.value,
        }

    def _step_s(self) -> float:
        return self._clock.elapsed() / self._num_steps if self._num_steps else 0.0

    # ---- measuring

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        super().on_enter_fit(trainer, stack, train_dataloader, val_dataloader, loop)
        stack.callback(self._leave)

    def _leave(self) -> None:
        self._checkpoints.end()
        self._total_s = time.perf_counter() - self._begun

    @override
    def on_enter_validate_all(
        self,
        trainer: Trainer,
        stack: ExitStack,
        val_dataloaders: list[Loader],
        loop: Any,
        ckpt_paths: list[Any],
    ) -> None:
        self._checkpoints.end()
        if trainer.is_fitting:
            self._validations.begin()
            stack.callback(self._validations.end)

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        super().on_save_checkpoint(trainer, state_dict)
        if trainer.is_fitting:
            self._checkpoints.begin()

    @override
    def saving_end(self) -> None:
        super().saving_end()
        self._checkpoints.end()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        if not self.counts(trainer):
            if self._clock.has_run:
                self._setup_s = time.perf_counter() - self._begun
        elif trainer.should_run_optimizer_step:
            self._num_steps += 1
            if trainer.is_log_step:
                self._log(trainer)

    # ---- time remaining

    def _log(self, trainer: Trainer) -> None:
        schedule, step = trainer.schedule, trainer.global_step
        step_s = self._step_s()
        metrics: dict[str, float] = {}
        stage_end = schedule.likely_stage_end
        if stage_end != math.inf:
            end = stage_end if stage_end > step else step
            metrics["loop_time_remaining"] = self._training_s(trainer, end, step_s)
        num_stages = schedule.num_stages_left(step)
        if num_stages is not None:
            left_s = self._training_s(trainer, schedule.likely_end, step_s, is_whole=True)
            if schedule.validates:
                left_s += num_stages * self._validations.value
            metrics["time_remaining"] = left_s
        trainer.log_metrics_dict(metrics)

    def _training_s(
        self, trainer: Trainer, end: float, step_s: float, *, is_whole: bool = False
    ) -> float:
        """Return the seconds of the steps and checkpoints from now until a step."""
        step, every = trainer.global_step, trainer.checkpoint.times.steps
        training_s = (end - step) * step_s
        if every is None:
            return training_s
        num_checkpoints = int(end // every) - (step - 1) // every
        num_checkpoints += is_whole and end % every != 0  # the final one
        return training_s + num_checkpoints * self._checkpoints.value


class MeanDuration:
    """Mean duration of a recurring event."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._num = 0
        self._began: float | None = None

    @property
    def value(self) -> float:
        """Mean in seconds; 0 if there was none."""
        return self._total_s / self._num if self._num else 0.0

    def begin(self) -> None:
        """Start measuring an event."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """Stop measuring. No-op if none has begun."""
        if self._began is not None:
            self._total_s += time.perf_counter() - self._began
            self._num += 1
            self._began = None
