"""A line in the log where something of a run begins or ends."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Callback, Loader

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.progress")


class PrintProgress(Callback):
    """Says where the fit, each pass over the data and each validation begin and end.

    It does so through `logging`, in the first process only.
    """

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
        self._is_told = trainer.backend.is_main

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        total = trainer.schedule.total_steps
        end = "as long as the data lasts" if total is None else f"to step {total}"
        self._say("training begins at step %d, %s", trainer.global_step, end)

    @override
    def on_train_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        end = trainer.schedule.end_epoch
        of_all = f" of {end:.0f}" if end < float("inf") else ""
        batch_idx = trainer.data.batch_idx
        taken_up = f", taken up at batch {batch_idx}" if batch_idx else ""
        self._say("epoch %d%s begins%s", epoch + 1, of_all, taken_up)

    @override
    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self._say("epoch %d ends at step %d", epoch + 1, trainer.global_step)

    @override
    def on_validate_start(
        self, trainer: Trainer, model: Module, val_dataloader: Loader, loop: Any
    ) -> None:
        self._is_told = trainer.backend.is_main
        self._say("%s begins at step %d", trainer.name_scope_path[:-1], trainer.global_step)

    @override
    def on_validate_end(self, trainer: Trainer, model: Module, loop: Any) -> None:
        how = "ends" if trainer.val_is_complete else "is cut short"
        self._say("%s %s", trainer.name_scope_path[:-1], how)

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        self._say("training ends at step %d", trainer.global_step)

    def _say(self, text: str, *values: Any) -> None:
        if self._is_told:
            log.info(text, *values)
