"""Operator-level profile of some training steps."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.base.constraints import PositiveInt, checked_dataclass
from modelzoo_trainer.callback import Batch, Loader
from modelzoo_trainer.callbacks.profiler import Profiler
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.performance")

_NAME: Final = "chrome_trace.json"
_NUM_STEPS: Final = 3


@checked_dataclass
class OpProfiler(Profiler):
    """Profile a window of training steps with torch.profiler, on the host and on the device.

    The trace is written to `chrome_trace.json` in `model_dir`, for https://ui.perfetto.dev or
    chrome://tracing; an older one is replaced. Only the main process is profiled. If an exception
    or the end of the fit cuts the window short, what was recorded is written. A trace takes some MB
    per step: keep the window small. If another torch profiler is active, it continues; there is no
    trace then, and a warning is logged.

    Args:
        start_step: First step of the window, counted from 1 over the whole run; -1 = the second
            step of the fit, as the first one includes initialization.
        end_step: Last step of the window, >= `start_step`; -1 = two after the first.
        host_activities: Accepted for compatibility; no effect on this hardware.

    Cost: In the window, some microseconds per operation.

    Raises:
        ConfigError: If the window is invalid; at setup, if there is another OpProfiler.
    """

    start_step: Literal[-1] | PositiveInt = -1
    end_step: Literal[-1] | PositiveInt = -1
    host_activities: list[str] | None = None

    def __post_init__(self) -> None:
        if -1 != self.end_step < self.start_step:
            raise ConfigError(
                f"OpProfiler.end_step is {self.end_step}; it must be at least start_step, "
                f"{self.start_step}."
            )
        self._window = range(0)
        self._profiler: torch.profiler.profile | None = None
        self._num_steps = 0
        self._began = self._elapsed = 0.0

    @property
    def notes(self) -> list[str]:
        """Arguments without effect."""
        if self.host_activities is None:
            return []
        return ["host_activities: no effect on this hardware; all activities are recorded."]

    @property
    @override
    def perf_metrics(self) -> dict[str, Any]:
        """The window: `profiled_steps`, and `profiled_time` in seconds."""
        return {"profiled_steps": self._num_steps, "profiled_time": self._elapsed}

    # ---- the window

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.get_callbacks(OpProfiler)[0] is not self:
            raise ConfigError(
                f"callbacks has two OpProfiler, and both would write {_NAME}. Use only one; its "
                f"start_step and end_step may include the steps of both."
            )

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._window = range(0)
        self._num_steps, self._elapsed = 0, 0.0
        stack.callback(self._finish, trainer)

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        begin, end = self.start_step, self.end_step
        if begin == -1:
            begin = trainer.global_step + 2
            begin = begin if end == -1 else min(begin, end)
        self._window = range(begin, (begin + _NUM_STEPS - 1 if end == -1 else end) + 1)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        if self._profiler is None and trainer.global_step + 1 in self._window:
            self._start(trainer)

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        if self._profiler is not None:
            self._num_steps += 1
            if trainer.global_step >= self._window[-1]:
                self._finish(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        if self._window and self._window[0] > trainer.global_step and trainer.backend.comm.is_main:
            log.warning(
                "OpProfiler: no trace of steps %d to %d: the fit ended at step %d.",
                self._window[0],
                self._window[-1],
                trainer.global_step,
            )

    def _start(self, trainer: Trainer) -> None:
        if not trainer.backend.comm.is_main:
            self._window = range(0)
            return
        from torch.profiler import profile

        # A second profiler would end the first one and crash the process.
        if torch._C._autograd._profiler_enabled():
            self._window = range(0)
            log.warning("OpProfiler: no trace, as another torch profiler is active.")
            return
        self._profiler = profile()
        self._profiler.start()
        self._began = time.perf_counter()

    def _finish(self, trainer: Trainer) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._window = range(0)
        trainer.backend.synchronize()
        self._elapsed = time.perf_counter() - self._began
        profiler.stop()
        path = trainer.model_dir / _NAME
        fresh = path.with_name(f".{_NAME}")
        try:
            fresh.unlink(missing_ok=True)
            profiler.export_chrome_trace(str(fresh))
            fresh.replace(path)
        except (OSError, RuntimeError) as error:  # torch's writer raises the latter
            log.warning("Cannot write %s: %s.", path, error)
            return
        log.info("Wrote %s: %d steps.", path, self._num_steps)
