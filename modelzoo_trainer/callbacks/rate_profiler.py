"""How fast training goes."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Loader, Outputs, StateDict
from modelzoo_trainer.data.batches import batch_size_of

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class RateProfiler(Callback):
    """Logs how fast a run trains, on log steps: samples of all processes, counted on the first.

    `local_samples_per_sec` is the rate since the last log step; `avg_samples_per_sec` and
    `avg_steps_per_sec` are those since the fit began. The clock starts at the end of the first
    step, which is not counted, and stands still during validations and checkpoints.
    """

    def __init__(self) -> None:
        self._clock = Stopwatch()
        self._reset()

    def _reset(self) -> None:
        self._clock = Stopwatch()
        self._num_samples = 0
        self._num_steps = 0
        self._logged_samples = 0
        self._logged_time = 0.0
        self._local_rate = 0.0

    @property
    def perf_metrics(self) -> dict[str, float]:
        """What was measured since the fit began.

        `total_samples`, `total_steps` and `total_time` (in seconds) without the first step;
        `rate`, since the last log step; `global_rate` and `samples_per_sec`, over all.
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

    # ---- when the clock runs

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._reset()
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

    @override
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        self._clock.go_on()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        self._clock.go_on()  # after a checkpoint that failed, or is written in the background

    # ---- what is counted

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        if not self._clock.has_run:
            if trainer.should_run_optimizer_step:
                self._clock.start()
            return
        self._num_samples += batch_size_of(batch) * trainer.backend.data_shard[1]
        if trainer.grad_accum.should_run_optimizer_step:
            self._num_steps += 1
            if trainer.is_log_step:
                self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        elapsed = self._clock.elapsed()
        since = elapsed - self._logged_time
        if since <= 0:
            return
        self._local_rate = (self._num_samples - self._logged_samples) / since
        self._logged_samples, self._logged_time = self._num_samples, elapsed
        trainer.log_metrics_dict(
            {
                "local_samples_per_sec": self._local_rate,
                "avg_samples_per_sec": self._num_samples / elapsed,
                "avg_steps_per_sec": self._num_steps / elapsed,
            }
        )


class Stopwatch:
    """Seconds, of the stretches in which it runs."""

    def __init__(self) -> None:
        self.has_run = False
        self._elapsed = 0.0
        self._started: float | None = None
        self._is_paused = False

    @property
    def is_running(self) -> bool:
        """Whether time is counted now."""
        return self._started is not None

    def start(self) -> None:
        """Count from now on."""
        self.has_run = True
        if self._started is None:
            self._started = time.perf_counter()

    def stop(self) -> None:
        """Stand still; a second call does nothing."""
        self._elapsed = self.elapsed()
        self._started = None

    def pause(self) -> None:
        """Stand still, if it runs, until `go_on`."""
        self._is_paused = self.is_running
        self.stop()

    def go_on(self) -> None:
        """Count again, if `pause` has stopped it."""
        if self._is_paused:
            self._is_paused = False
            self.start()

    def elapsed(self) -> float:
        """Return the seconds so far."""
        if self._started is None:
            return self._elapsed
        return self._elapsed + time.perf_counter() - self._started
