"""Keep a report of the run current."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer.base.constraints import FinitePositiveFloat, checked
from modelzoo_trainer.callback import Callback, Loader, Metrics
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loggers import JsonlLogger

if TYPE_CHECKING:
    from modelzoo_trainer.hooks.logger import Logger
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.report")

_NAME: Final = "report.html"
_COMMAND: Final = "modelzoo_trainer.tools.report"
_NICENESS: Final = 10
_LAST_WAIT_S: Final = 60.0
_SHARE: Final = 10  # writing takes at most one tenth of the time of one CPU core


class Report(Callback):
    """Keep an HTML report of the run current: `report.html` in `model_dir`.

    It is the report of `modelzoo-trainer report`. A separate process with low priority writes it
    at most every `interval_s` seconds, and at the end of a fit or a validation, even after an
    error. Failures are logged as a warning. Requires a `JsonlLogger`.

    Args:
        interval_s: Minimum seconds between two reports, > 0. The next one starts no
            earlier than ten times the CPU time of the last one after its start: a report that
            takes 1 s of CPU time is written at most every 10 s.
        path: The file; None = `report.html` in `model_dir`. A file that is not a report is not
            overwritten.

    Raises:
        ConfigError: If the interval is not positive; at set-up, if plotly is not installed.

    Cost: A clock read when metrics are logged; at most a tenth of one CPU core at low priority
    (about 1 s of CPU time per report, more for long runs); the end of a run waits for the last
    report.
    """

    @checked()
    def __init__(self, interval_s: FinitePositiveFloat = 60.0, path: Path | None = None) -> None:
        self.interval_s = interval_s
        self.path = path
        self._process: subprocess.Popen[str] | None = None
        self._started = self._next = self._cpu_before = 0.0
        self._command: list[str] = []
        self._depth = 0
        self._has_failed = False

    @override
    def setup(self, trainer: Trainer) -> None:
        if find_spec("plotly") is None:
            raise ConfigError(
                "Report requires plotly, which is not installed: pip install "
                "'modelzoo-trainer[report]'"
            )
        target = trainer.model_dir / _NAME if self.path is None else Path(self.path)
        folder = os.path.abspath(trainer.model_dir)
        self._command = [
            *(sys.executable, "-m", _COMMAND, folder),
            *("-o", os.path.abspath(target)),
        ]

    @override
    def post_setup(self, trainer: Trainer) -> None:
        if not any(_has_metrics(one) for one in trainer.loggers):
            log.warning(
                "Report: no report is written, since the trainer has no JsonlLogger. Add "
                "loggers=[JsonlLogger()]."
            )
            self._has_failed = True

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._enter(trainer, stack)

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        self._enter(trainer, stack)

    def _enter(self, trainer: Trainer, stack: ExitStack) -> None:
        if not trainer.backend.comm.is_main or not trainer.backend.caps.holds_values:
            return
        if self._depth == 0:  # not a validation within a fit
            self._next = time.monotonic() + min(self.interval_s, 5.0)  # first report soon
        self._depth += 1
        stack.callback(self._leave, trainer)

    def _leave(self, trainer: Trainer) -> None:
        self._depth -= 1
        if self._depth == 0:
            for logger in trainer.loggers:
                if _has_metrics(logger):
                    logger.flush()
            self._wait()
            self._start()
            self._wait()

    @override
    def on_metrics(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        if self._depth and time.monotonic() >= self._next:
            self._next = time.monotonic() + 1.0
            if self._is_over():
                self._start()

    def _start(self) -> None:
        """Start a process that writes the report."""
        if self._has_failed:
            return
        self._started, self._cpu_before = time.monotonic(), _cpu_of_children()
        try:
            self._process = subprocess.Popen(
                self._command,
                cwd=Path(__file__).resolve().parents[3],  # to import this package
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # not interrupted by Ctrl-C
            )
        except OSError as error:
            self._fail(str(error))
            return
        self._next = self._started + self.interval_s
        with suppress(AttributeError, OSError):  # not on every system
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)

    def _is_over(self) -> bool:
        """Return whether a new report may be started; warn if the last one failed."""
        process = self._process
        if process is None:
            return True
        if process.poll() is None:
            return False
        took = time.monotonic() - self._started  # long if training keeps all cores busy
        used = _cpu_of_children() - self._cpu_before  # too much if others have ended, too
        cost = min(took, used) if used > 0 else took
        self._next = max(self._next, self._started + _SHARE * cost)
        self._end(process)
        return time.monotonic() >= self._next

    def _wait(self) -> None:
        """Wait for the pending report."""
        process = self._process
        if process is None:
            return
        try:
            process.wait(_LAST_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self._fail(f"it took more than {_LAST_WAIT_S:.0f} s")
        self._end(process)

    def _end(self, process: subprocess.Popen[str]) -> None:
        self._process = None
        said = "" if process.stderr is None else process.stderr.read().strip()
        if process.stderr is not None:
            process.stderr.close()
        if process.returncode != 0:
            self._fail(said or f"exit code {process.returncode}")

    def _fail(self, why: str) -> None:
        if not self._has_failed:
            log.warning("Stopped updating the report (%s); training continues.", why)
        self._has_failed = True


def _cpu_of_children() -> float:
    """Return the CPU seconds of all child processes that have ended; 0 = not known here."""
    found = os.times()
    return found.children_user + found.children_system


def _has_metrics(logger: Logger) -> bool:
    """Return whether a logger writes the metrics file of the report."""
    return isinstance(logger, JsonlLogger)
