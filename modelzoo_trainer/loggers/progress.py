"""Progress on the console: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Final

from annotated_types import Ge
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.callback import Loader, Metrics, StateDict
from modelzoo_trainer.console_bar import BAR_INTERVAL_S, Bar, duration, is_terminal, number
from modelzoo_trainer.constraints import checked
from modelzoo_trainer.loggers.logger import Logger

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.progress")

LINE_INTERVAL_S: Final = 10.0
_NUM_LOSSES: Final = 10
_VALIDATION: Final = re.compile(r"(validate_\d+)/(.+)")


class ProgressLogger(Logger):
    """Shows how far training is, its loss and its rate.

    On a terminal that is a bar. Elsewhere it is a line through `logging`: for the first and the
    last logged step of a fit, and in between for a logged step every `interval_s` seconds.
    Results of validations always get a line, and a fit ends with a summary. When training goes back
    to a checkpoint, so does the bar.

    Args:
        interval_s: Least seconds between two lines (or drawings of the bar); None = 10 (0.1).

    Raises:
        ConfigError: If it is negative.
    """

    @checked()
    def __init__(self, interval_s: Annotated[float, Ge(0)] | None = None) -> None:
        self._interval_s = interval_s
        self._scopes: frozenset[str] = frozenset()
        self._reset()

    def _reset(self) -> None:
        self._bar: Any = None
        self._every_s = LINE_INTERVAL_S if self._interval_s is None else self._interval_s
        self._is_fitting = False
        self._start = self._next = 0.0
        self._start_step = 0
        self._rate_start, self._rate_step = 0.0, 0
        self._total: int | None = None
        self._pending: tuple[Metrics, int] | None = None
        self._losses: dict[str, deque[tuple[int, float]]] = {}

    # ---- a fit

    @override
    def setup(self, trainer: Trainer) -> None:
        own = [callback.name_scope for callback in trainer.validation_callbacks]
        self._scopes = frozenset(own)

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
        stack.callback(self._end)

    def _end(self) -> None:
        self._leave()
        self._reset()

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._start = self._rate_start = time.perf_counter()
        self._start_step = self._rate_step = trainer.global_step
        self._total = trainer.schedule.total_steps
        self._is_fitting = trainer.backend.comm.is_main
        if self._is_fitting and is_terminal():
            self._every_s = BAR_INTERVAL_S if self._interval_s is None else self._interval_s
            self._bar = Bar(self._start_step, self._total)

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if not (trainer.is_resuming and self._is_fitting):  # the fit may be about to start
            return
        step = trainer.global_step
        self._rate_start, self._rate_step = time.perf_counter(), step
        self._pending = None
        for name, losses in self._losses.items():
            kept = [loss for loss in losses if loss[0] <= step]
            self._losses[name] = deque(kept, maxlen=_NUM_LOSSES)
        if self._bar is not None:
            self._bar.show(step, "")

    @override
    def on_train_end(self, trainer: Trainer, model: Any, loop: Any, loop_idx: int) -> None:
        if self._bar is not None and self._pending is not None:
            self._show(*self._pending)

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        if not self._is_fitting:
            return
        self._leave()
        elapsed = time.perf_counter() - self._start
        num_steps = trainer.global_step - self._start_step
        text = f"fit ended at step {trainer.global_step}: {num_steps} steps in {elapsed:.1f} s"
        for name, losses in self._losses.items():
            curve = ", ".join(f"{number(loss)} ({step})" for step, loss in losses)
            text += f" | {name} (at step): {curve}"
        log.info("%s", text)

    @override
    def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._leave()

    def _leave(self) -> None:
        """Show the last step, and take the bar away: its place is the console's again."""
        if self._pending is not None:
            self._show(*self._pending)
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    # ---- metrics

    @override
    def log_metrics(self, metrics: Metrics, step: int) -> None:
        if "loss" in metrics and self._is_fitting:
            now = time.perf_counter()
            if now < self._next and step != self._total:
                self._pending = (metrics, step)
                return
            self._next = now + self._every_s
            self._show(metrics, step)
            return
        for scope, results in self._validations(metrics).items():
            if "loss" in results and self._is_fitting:
                losses = self._losses.setdefault(f"{scope}/loss", deque(maxlen=_NUM_LOSSES))
                losses.append((step, results["loss"]))
            shown = ", ".join(f"{name} {number(value)}" for name, value in results.items())
            log.info("%s: %s at step %d", scope, shown, step)

    def _validations(self, metrics: Metrics) -> dict[str, Metrics]:
        """Return the results of validations among metrics, by their scopes; tensors left out."""
        found: dict[str, Metrics] = {}
        for name, value in metrics.items():
            match = _VALIDATION.fullmatch(name)
            scope, _, rest = name.partition("/")
            if isinstance(value, Tensor) and value.numel() > 1:
                continue
            if match is not None or (rest and scope in self._scopes):
                found.setdefault(scope, {})[rest] = value
        return {scope: _loss_first(results) for scope, results in found.items()}

    def _show(self, metrics: Metrics, step: int) -> None:
        self._pending = None
        figures = [f"loss {number(metrics['loss'])}"]
        if "local_samples_per_sec" in metrics:
            rate = metrics["local_samples_per_sec"]
            figures.append(f"{rate:.0f} samples/s" if rate >= 100 else f"{rate:.3g} samples/s")
        if "lr/0" in metrics:
            figures.append(f"lr {metrics['lr/0']:.4g}")
        if self._bar is not None:
            self._bar.show(step, " | ".join(figures))
            return
        position = str(step) if self._total is None else f"{step}/{self._total}"
        log.info("train step %s | %s | %s", position, " | ".join(figures), self._times(step))

    def _times(self, step: int) -> str:
        now = time.perf_counter()
        text = f"{duration(now - self._start)} elapsed"
        num_done = step - self._rate_step
        if self._total is not None and num_done > 0:
            step_s = (now - self._rate_start) / num_done
            text += f", {duration(step_s * (self._total - step))} left"
        return text


def _loss_first(results: Metrics) -> Metrics:
    return {name: results[name] for name in sorted(results, key=lambda name: name != "loss")}
