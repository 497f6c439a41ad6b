"""Graceful stops by signals, a stop file or a time limit."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.base import stderr
from modelzoo_trainer.base.exit_codes import PREEMPTED, STOP_SIGNALS
from modelzoo_trainer.callback import Batch, CoreCallback, Loader

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.interrupt")

STOP_FILE: Final = "stop"
_RAISED: Final = ("SIGINT", "SIGTERM")  # raised after the fit, to end the program
_TIME_IS_UP: Final = "max_time"
_INTERVAL_S: Final = 1.0  # between checks of the time limit and the stop file


class Interrupt(CoreCallback):
    """Stop a fit gracefully when it is interrupted.

    Interruptions are SIGINT, SIGTERM and SIGUSR1; a file `stop` in `model_dir`, which is removed;
    and the end of the loop's `max_time`, counted from the start of the fit, or of its first attempt
    if a supervisor restarts it. A second Ctrl-C ends the fit immediately. Signal handlers are
    installed during the fit only, and only in the main thread.

    After the fit, a warning reports what stopped it, at which step, and what was saved. Ctrl-C and
    SIGTERM are then raised, to end the program; after other interruptions `fit` returns. See
    `trainer.raise_on_interrupt`.
    """

    def __init__(self) -> None:
        self._handles_signals = True
        self._received: str | None = None
        self._speaks = True
        self._end: float | None = None
        self._next_look = math.inf  # outside of a fit
        self._stop_file = Path()
        self._first_step: int | None = None

    def leave_signals(self) -> None:
        """Leave signals to the program during a fit, too."""
        self._handles_signals = False

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        trainer.late_signal = None
        self._early_exit = trainer.early_exit
        self._speaks = trainer.backend.comm.is_main
        self._stop_file = trainer.model_dir / STOP_FILE
        limit_s = loop.max_time_s
        began = trainer.autorestart.began or time.monotonic()
        self._end = None if limit_s is None else began + limit_s
        self._next_look = 0.0
        self._first_step = None
        stack.callback(self._leave, trainer)
        if not self._handles_signals or threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            before = signal.signal(number, self._receive) or signal.SIG_DFL
            stack.callback(signal.signal, number, before)

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._first_step = trainer.global_step

    def _leave(self, trainer: Trainer) -> None:
        self._next_look = math.inf
        if trainer.interrupted == _TIME_IS_UP and trainer.global_step == self._first_step:
            log.warning(
                "The time limit loop.max_time was reached before the first step, so a rerun would "
                "stop here again. Set loop.max_time to more than one validation takes."
            )

    def _conclude(self, trainer: Trainer) -> None:
        """Report what stopped a fit, and raise Ctrl-C or SIGTERM.

        Raises:
            KeyboardInterrupt: After SIGINT.
            SystemExit: After SIGTERM.
        """
        if trainer.backend.comm.is_main and os.path.lexists(self._stop_file):
            _remove(self._stop_file)
            log.warning(
                "Removed %s: it was created too late to stop this run, and must not stop the next "
                "one.",
                self._stop_file,
            )
        trainer.late_signal = self._late_signal(trainer)
        name = trainer.interrupted or trainer.late_signal
        if name is None:
            return
        message = f"The run was stopped by {name} at global_step {trainer.global_step}"
        if trainer.interrupted is None:
            message = f"{name} arrived after the last step of the run, {trainer.global_step}"
        if trainer.backend.comm.is_main:
            is_new = trainer.global_step != self._first_step
            log.warning("%s: %s.", message, trainer.checkpoint.saved_by_fit(trainer, is_new=is_new))
        if trainer.raise_on_interrupt:
            _end_program(name, message)

    def _late_signal(self, trainer: Trainer) -> str | None:
        """Return the signal that arrived after the last step boundary."""
        if trainer.interrupted is not None or trainer.backend.comm.world_size > 1:
            return None  # with several processes it stops the next fit
        return self._received

    def stopped_by(self, trainer: Trainer) -> str | None:
        """Return what interrupted the fit, or arrived too late to; None = nothing."""
        return trainer.interrupted or self._late_signal(trainer)

    def will_raise(self, trainer: Trainer) -> bool:
        """Return whether the program ends after this fit, to be started again."""
        return trainer.raise_on_interrupt and self.stopped_by(trainer) in _RAISED

    @contextmanager
    def ending(self, trainer: Trainer) -> Iterator[None]:
        """Around a fit: report what stopped it, and end the program after Ctrl-C or SIGTERM.

        Also if the fit has failed after a signal.

        Raises:
            KeyboardInterrupt: After SIGINT; from the error, if there is one.
            SystemExit: After SIGTERM; the error is logged, since Python does not print it.
        """
        self._received = None
        try:
            yield
        except Exception as error:
            name = self._received
            if name not in _RAISED or not trainer.raise_on_interrupt:
                raise
            message = f"The run failed at global_step {trainer.global_step} after {name}"
            if name == "SIGTERM":
                log.error("%s:", message, exc_info=error)
            _end_program(name, message, error)
        else:
            self._conclude(trainer)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._received is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt(f"{name} a second time")
            return
        self._received = name
        self._early_exit.interrupt(name)
        if not self._speaks:
            return
        # Not by logging: the signal may have interrupted it.
        again = "press Ctrl-C again" if number == signal.SIGINT else "send SIGINT (Ctrl-C)"
        text = f"{name}: stopping after this step; {again} to stop immediately.\n"
        stderr.write(text, patience_s=0)

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        if time.monotonic() >= self._next_look:
            self._look(trainer)

    @override
    def on_validate_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        if time.monotonic() >= self._next_look:
            self._look(trainer)

    @override
    def on_predict_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        self.on_validate_batch_start(trainer, model, batch, batch_idx)

    def _look(self, trainer: Trainer) -> None:
        now = time.monotonic()
        self._next_look = now + _INTERVAL_S
        if not trainer.backend.comm.is_main:
            return
        if self._end is not None:
            if now >= self._end:
                trainer.early_exit.interrupt(_TIME_IS_UP)
            self._next_look = min(self._next_look, self._end)
        if os.path.lexists(self._stop_file):
            _remove(self._stop_file)
            trainer.early_exit.interrupt("stop file")


def _end_program(name: str | None, message: str, cause: Exception | None = None) -> None:
    """Raise the exception of a signal; a no-op for other names.

    Raises:
        KeyboardInterrupt: After SIGINT.
        SystemExit: After SIGTERM.
    """
    if name == "SIGINT":
        raise KeyboardInterrupt(message) from cause
    if name == "SIGTERM":
        raise SystemExit(PREEMPTED) from cause


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        log.warning(
            "The stop file %s cannot be removed (%s), so the next run will stop immediately. "
            "Remove it first.",
            path,
            error,
        )
