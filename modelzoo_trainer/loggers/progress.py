"""Progress on the console: a summary of the run, a bar or lines, and the results."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Final

from annotated_types import Ge
from typing_extensions import override

from modelzoo_trainer.base.constraints import checked
from modelzoo_trainer.callback import Loader, Metrics, StateDict
from modelzoo_trainer.core.parts.results_log import log_results, number, scopes_of
from modelzoo_trainer.hooks.logger import Logger
from modelzoo_trainer.loading.epochs import known_length
from modelzoo_trainer.loggers.console.blocks import end_block, start_block
from modelzoo_trainer.loggers.console.display import Display, View, kind_of_console
from modelzoo_trainer.loggers.console.harmless import harmless, known
from modelzoo_trainer.loggers.console.pace import Pace

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.progress")

_COMPILING: Final = 3  # steps on a device that traces them


class ProgressLogger(Logger):
    """Show the progress and the results of a run on the console.

    A fit starts with a few lines about the model, the data, the length and the folder, and ends
    with a table of the last and best metrics. In between, a terminal or a notebook shows a bar:
    epoch, step, the last logged loss, steps per second, time left. Otherwise lines are logged: for
    the first log step, and at most every 10 seconds. Validation results always get a line. Only the
    main process writes.

    A trainer adds one by default. `progress="bar"` or `"lines"` selects the format, `"none"`
    disables it.

    The time left is estimated from the steps of the last 30 seconds of training, and the mean time
    of past validations and checkpoints.

    Args:
        interval_s: Minimum seconds between two lines of logged steps (or updates of the bar);
            None = 10 (0.1).

    Raises:
        ConfigError: If it is negative.

    Cost:
        None in the step: a thread updates it, at most ten times a second.
    """

    draws_console: Final = True
    """Whether it replaces the default one of a trainer."""
    shows_hints: Final = True
    """Whether its start lists the hints about the fit."""
    shows_progress = True

    @checked()
    def __init__(self, interval_s: Annotated[float, Ge(0)] | None = None) -> None:
        self._interval_s = interval_s
        self._scopes: frozenset[str] = frozenset()
        self._logs_results = True
        self._reset()

    def _reset(self) -> None:
        self._display: Display | None = None
        self._trainer: Any = None
        self._is_fitting = False
        self._begin = time.perf_counter()
        self._pace = Pace(0)
        self._metrics: Metrics = {}
        self._metrics_step = 0
        self._num_samples: int | None = None
        self._val_batches = 0
        self._doing: tuple[str, int | None] | None = None

    # ---- a fit

    @override
    def setup(self, trainer: Trainer) -> None:
        self._scopes = scopes_of(trainer)
        self._logs_results = trainer.progress != "none"

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._end()
        stack.callback(self._end)

    def _end(self) -> None:
        self._stop()
        self._reset()

    def _stop(self) -> None:
        display, self._display = self._display, None
        if display is not None:
            display.stop()

    @override
    @harmless()
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        schedule = trainer.schedule
        if not _is_shown(trainer):
            return
        self._is_fitting = True
        self._val_batches = _num_batches(val_dataloader, loop.eval_steps) or 0
        samples = known(trainer.data.samples_per_batch, None)
        self._num_samples = None if samples is None else samples * loop.grad_accum_steps
        num_first = _COMPILING if trainer.backend.caps.lazy else 1
        self._pace = Pace(trainer.global_step, num_first)
        if schedule.has_steps_left(trainer) or schedule.owes_validation(trainer):
            log.info("%s", start_block(trainer, val_dataloader))
            self._show(trainer)

    def _show(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._begin = time.perf_counter()
        kind = kind_of_console(trainer.progress)
        display = Display(kind, self._look, self._interval_s)
        display.start()
        self._display = display

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if self._is_fitting and trainer.is_resuming:  # rolled back
            self._pace.go_back_to(trainer.global_step)
            self._metrics = {}

    @override
    def on_train_start(
        self, trainer: Trainer, model: Any, train_dataloader: Loader, loop: Any, loop_idx: int
    ) -> None:
        self._pace.go_on("no training")

    @override
    def on_train_end(self, trainer: Trainer, model: Any, loop: Any, loop_idx: int) -> None:
        if self._is_fitting:
            self._pace.look(trainer.global_step)
            self._pace.pause("no training")

    @override
    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        if self._is_fitting:
            self._pace.look(trainer.global_step)

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if self._is_fitting:
            self._pace.begin_save()

    def saving_end(self) -> None:
        """End the time of a checkpoint, or of one beside the run's own."""
        self._pace.end_save()

    @override
    @harmless()
    def on_fit_committed(self, trainer: Trainer, loop: Any) -> None:
        if not self._is_fitting:
            return
        self._pace.look(trainer.global_step)
        self._stop()
        result = trainer.summary.so_far(trainer)
        if self._trainer is not None:
            log.info("%s", end_block(result, self._pace.mean_step_s, self._num_samples))

    @override
    @harmless()
    def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
        if self._display is not None:
            self._display.say()
        self._stop()

    # ---- validations

    @override
    def on_enter_validate_all(
        self,
        trainer: Trainer,
        stack: ExitStack,
        val_dataloaders: list[Loader],
        loop: Any,
        ckpt_paths: list[Any],
    ) -> None:
        if self._is_fitting:
            self._pace.validations.begin()
            stack.callback(self._pace.validations.end)

    @override
    @harmless()
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        if not _is_shown(trainer):
            return
        doing = trainer.name_scope_path[:-1], _num_batches(val_dataloader, loop.eval_steps)
        if self._is_fitting:
            self._pace.pause("validation")
            stack.callback(self._pace.go_on, "validation")
            stack.callback(setattr, self, "_doing", self._doing)
            self._doing = doing
        elif self._display is None and not trainer.is_fitting:
            stack.callback(self._end)
            self._doing = doing
            self._pace = Pace(0)
            self._show(trainer)

    # ---- metrics

    @override
    def log_metrics(self, metrics: Metrics, step: int) -> None:
        if "loss" in metrics and self._is_fitting:
            self._metrics, self._metrics_step = metrics, step
            if self._display is not None:
                self._display.say_if_due()
            return
        if self._logs_results:  # else `Summary` logs them
            log_results(log, metrics, step, self._scopes)

    # ---- progress; also called by the thread of the display

    def _look(self) -> View:
        return self._look_at_fit() if self._is_fitting else self._look_at_validation()

    def _look_at_fit(self) -> View:
        trainer, pace = self._trainer, self._pace
        pace.look(trainer.global_step)
        return View(
            step=pace.step,
            total=trainer.schedule.total_steps,
            epoch=_epoch(trainer),
            losses=self._losses(pace.step),
            unit_s=pace.step_s,
            elapsed_s=time.perf_counter() - self._begin,
            left_s=self._left_s(),
            doing="" if self._doing is None else self._validated(*self._doing),
        )

    def _losses(self, step: int) -> tuple[str, ...]:
        metrics = self._metrics
        if not metrics:
            return ()
        loss = f"loss {number(metrics['loss'])}"
        if step > self._metrics_step:  # mark an older value
            loss += f" (step {self._metrics_step})"
        lr = metrics.get("lr/0")
        return (loss,) if lr is None else (loss, f"lr {lr:.4g}")

    def _left_s(self) -> float | None:
        trainer, step = self._trainer, self._pace.step
        total = trainer.schedule.total_steps
        if total is None:
            return None
        every = trainer.checkpoint.times.steps
        num_saves = 0 if every is None else total // every - step // every
        num_saves += trainer.checkpoint.saves_at_end and (every is None or total % every != 0)
        validates = trainer.schedule.validates and self._val_batches
        num_validations = (trainer.schedule.num_stages_left(step) or 0) if validates else 0
        return self._pace.left_s(total - step, num_validations, self._val_batches, num_saves)

    def _validated(self, scope: str, total: int | None) -> str:
        batches = self._trainer.val_iterator
        num = 0 if batches is None else batches.num_yielded
        return f"{scope} {num}" if total is None else f"{scope} {num}/{total}"

    def _look_at_validation(self) -> View:
        assert self._doing is not None  # set before the display starts
        scope, total = self._doing
        batches, pace = self._trainer.val_iterator, self._pace
        pace.look(0 if batches is None else batches.num_yielded)
        return View(
            name=scope,
            unit="batch",
            step=pace.step,
            total=total,
            unit_s=pace.step_s,
            elapsed_s=time.perf_counter() - self._begin,
            left_s=None if total is None else pace.left_s(total - pace.step, 0, 0, 0),
        )


def _is_shown(trainer: Trainer) -> bool:
    return trainer.progress != "none" and trainer.backend.comm.is_main


def _num_batches(dataloader: Loader, eval_steps: int | None) -> int | None:
    """Return the number of batches of a validation; None = not known."""
    length = known(lambda: known_length(dataloader), None)  # a user's `len` may raise
    return min(filter(None, (length, eval_steps)), default=None)


def _epoch(trainer: Trainer) -> str:
    """Return the epoch of the last step; the next one may not have begun."""
    end, data = trainer.schedule.end_epoch, trainer.data
    epoch = max(data.epoch + (not data.is_between_epochs), 1)
    if end < float("inf"):
        return f"epoch {min(epoch, int(end))}/{int(end)}"
    return f"epoch {epoch}"
