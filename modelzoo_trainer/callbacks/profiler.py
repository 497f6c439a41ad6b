"""What measures a run: profilers, and the clock of those that measure training alone."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Loader, StateDict

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class Profiler(Callback, ABC):
    """Base of callbacks that measure; `SavePerformanceData` writes what they have measured."""

    @property
    @abstractmethod
    def perf_metrics(self) -> dict[str, Any]:
        """What was measured since the fit began: numbers by name."""


class TrainingProfiler(Profiler):
    """Base of those that measure training alone.

    The clock starts at the end of the first step, which is not counted, and stands still during
    validations and checkpoints.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew: a fit begins."""
        self._clock = Stopwatch()
        self._asked_at = 0.0
        self._asked_for = 0

    def counts(self, trainer: Trainer) -> bool:
        """Return whether the batch that ends is counted; start the clock if it is the first."""
        if self._clock.has_run:
            return True
        if trainer.should_run_optimizer_step:
            self._clock.start()
        return False

    def rate_since(self, total: int) -> float | None:
        """Return how many a second there were since this was asked last; None = no time went by.

        Args:
            total: How many there were since the fit began.
        """
        elapsed = self._clock.elapsed()
        since = elapsed - self._asked_at
        if since <= 0:
            return None
        rate = (total - self._asked_for) / since
        self._asked_at, self._asked_for = elapsed, total
        return rate

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

    @override
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        self._clock.go_on()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        self._clock.go_on()  # after a checkpoint that failed, or is written in the background


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
