"""The progress of a run: a line where something begins or ends, or a bar."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Loader, Metrics, Outputs
from modelzoo_trainer.core.parts.results_log import number
from modelzoo_trainer.loading.epochs import known_length
from modelzoo_trainer.loggers.console.bar import (
    BAR_INTERVAL_S,
    Bar,
    is_notebook,
    is_terminal,
)
from modelzoo_trainer.loggers.console.harmless import harmless

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.progress")


class PrintProgress(Callback):
    """Says where the fit, each epoch and each validation begin and end.

    It does so through `logging`, in the first process only.
    """

    shows_progress = True

    def __init__(self) -> None:
        self._is_told = False

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._is_told = trainer.backend.comm.is_main

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        total = trainer.schedule.total_steps
        end = "until the data ends" if total is None else f"to step {total}"
        self._say("training begins at step %d, %s", trainer.global_step, end)

    @override
    def on_train_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        end = trainer.schedule.end_epoch
        of_all = f" of {end:.0f}" if end < float("inf") else ""
        batch_idx = trainer.data.batch_idx
        taken_up = f", resumed at batch {batch_idx}" if batch_idx else ""
        self._say("epoch %d%s begins%s", epoch + 1, of_all, taken_up)

    @override
    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self._say("epoch %d ends at step %d", epoch + 1, trainer.global_step)

    @override
    def on_validate_start(
        self, trainer: Trainer, model: Module, val_dataloader: Loader, loop: Any
    ) -> None:
        self._is_told = trainer.backend.comm.is_main
        self._say("%s begins at step %d", trainer.name_scope_path[:-1], trainer.global_step)

    @override
    def on_validate_end(self, trainer: Trainer, model: Module, loop: Any) -> None:
        how = "ends" if trainer.val_is_complete else "ends early"
        self._say("%s %s", trainer.name_scope_path[:-1], how)

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        self._say("training ends at step %d", trainer.global_step)

    def _say(self, text: str, *values: Any) -> None:
        if self._is_told:
            log.info(text, *values)


class ProgressBar(Callback):
    """Shows a bar for each epoch, and for each validation.

    It counts batches. Nothing is shown but on a terminal, and by the first process. Beside
    `ProgressLogger`, whose bar is for the whole fit, each has a line of its own.

    Cost: Reads the clock once per batch; a drawing ten times a second at most.
    """

    shows_progress = True

    def __init__(self) -> None:
        self._train: Bar | None = None
        self._val: Bar | None = None
        self._figures = ""
        self._next = 0.0

    # ---- epochs

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        stack.callback(self._close_train)

    @override
    @harmless()
    def on_train_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        self._close_train()
        if _is_shown(trainer):
            begin, total = trainer.data.batch_idx, trainer.data.num_batches_per_epoch()
            self._train = Bar(begin, total, f"epoch {epoch + 1}", "batch")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        if self._train is not None:
            self._draw(self._train, trainer.data.batch_idx, self._figures)

    @override
    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self._close_train()

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        self._close_train()

    @override
    def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._close_train()

    @override
    def on_metrics(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        loss = metrics.get("loss")
        if self._train is not None and isinstance(loss, Real):
            self._figures = f"loss {number(loss)}"

    @harmless(logging.DEBUG)
    def _close_train(self) -> None:
        bar, self._train, self._figures = self._train, None, ""
        if bar is not None:
            bar.close()

    # ---- validations

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        stack.callback(self._close_val)

    @override
    @harmless()
    def on_validate_start(
        self, trainer: Trainer, model: Module, val_dataloader: Loader, loop: Any
    ) -> None:
        self._close_val()
        if _is_shown(trainer):
            ends = [end for end in (known_length(val_dataloader), loop.eval_steps) if end]
            name = trainer.name_scope_path[:-1]
            self._val = Bar(0, min(ends, default=None), name, "batch")

    @override
    def on_validate_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        if self._val is not None:
            self._draw(self._val, batch_idx + 1, "")

    @override
    def on_validate_end(self, trainer: Trainer, model: Module, loop: Any) -> None:
        self._close_val()

    @harmless(logging.DEBUG)
    def _close_val(self) -> None:
        bar, self._val = self._val, None
        if bar is not None:
            bar.close()

    @harmless(logging.DEBUG)
    def _draw(self, bar: Bar, num_done: int, figures: str) -> None:
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + BAR_INTERVAL_S
            bar.show(num_done, figures)


def _is_shown(trainer: Trainer) -> bool:
    return trainer.backend.comm.is_main and (is_terminal() or is_notebook())
