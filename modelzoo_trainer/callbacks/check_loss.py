"""Ends a run whose loss is no number."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Loader, Outputs

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class CheckLoss(Callback):
    """Raises when the loss of a training or validation step is NaN or infinite.

    The loss is read without waiting for the device, so the error may come some steps late; it
    names the step that it belongs to. No checkpoint is written in between.

    Raises:
        FloatingPointError: With the step, and the last finite loss before it.
    """

    def __init__(self) -> None:
        self._last_train: tuple[float, int] | None = None
        self._last_val: tuple[float, int] | None = None

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._last_train = self._last_val = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        loss = outputs["loss"]
        if trainer.backend.reads_at_once and math.isfinite(value := loss.item()):
            self._last_train = (value, trainer.global_step)
        else:
            trainer.read((loss,), partial(self._check_train, trainer))

    @override
    def on_validate_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        loss = outputs.get("loss")
        if isinstance(loss, Tensor):
            trainer.read((loss,), partial(self._check_val, trainer))

    def _check_train(self, trainer: Trainer, values: list[Any]) -> None:
        loss = _number(values[0])
        if not math.isfinite(loss):
            raise _error("loss", loss, trainer.global_step, self._last_train)
        self._last_train = (loss, trainer.global_step)

    def _check_val(self, trainer: Trainer, values: list[Any]) -> None:
        loss = _number(values[0])
        if not math.isfinite(loss):
            name = f"{trainer.name_scope_path}loss"
            raise _error(name, loss, trainer.global_step, self._last_val)
        self._last_val = (loss, trainer.global_step)


def _number(value: Any) -> float:
    """Return a loss as one number; that of several is finite if all of them are."""
    return float(value.double().sum()) if isinstance(value, Tensor) else value


def _error(name: str, loss: float, step: int, last: tuple[float, int] | None) -> FloatingPointError:
    before = "No loss before it was finite."
    if last is not None:
        before = f"Last finite loss: {last[0]:.6g} at {last[1]}."
    return FloatingPointError(f"{name} is {loss} at global_step {step}. {before}")
