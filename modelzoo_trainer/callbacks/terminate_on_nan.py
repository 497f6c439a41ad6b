"""Graceful stop on a non-finite loss."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Loader, Outputs
from modelzoo_trainer.callbacks.check_loss import CheckLoss
from modelzoo_trainer.callbacks.step_guard import StepFinding, StepGuard
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.terminate_on_nan")


class TerminateOnNaN(Callback):
    """Stop the run gracefully when the loss of a training or validation step is NaN or infinite.

    Gracefully means that the end hooks are called, the final checkpoint is written and nothing is
    raised. The bad step is skipped, which is decided on the device: weights, buffers and optimizer
    state stay bit by bit as they were before its first batch. Schedules and `global_step` count it.
    On devices that are read asynchronously, a few good steps may follow before the stop.

    A run that was stopped this way stops again at once when it is resumed. To continue, remove the
    callback or start from an earlier checkpoint.

    A `CheckLoss` with default arguments (which every YAML file has) does not raise beside this
    callback. One with another policy, gradients or spikes is refused as contradictory.

    Args:
        check_gradients: Whether a non-finite gradient norm makes a step bad as well. Not with a
            loss scaler, which skips such steps itself.

    Metrics:
        skipped_steps: Number of skipped steps; 0 until shortly before the stop.

    State: Why the run was stopped; within a step of several batches, their partial results.

    Raises:
        ConfigError: When a trainer is created or a fit starts, if a `CheckLoss` contradicts it.

    Cost: As `CheckLoss("skip")`: a masked update, a copy of the buffers, the gradient norm.
    """

    needs_trainer = True
    needs_one_optimizer = True
    handles_bad_losses = True

    def __init__(self, check_gradients: bool = True) -> None:
        self.check_gradients = check_gradients
        self.reason: str | None = None
        """Why the run was stopped; None = it was not."""
        self._guard: StepGuard | None = None
        self._is_foreign = False

    # ---- setup and fit

    @override
    def setup(self, trainer: Trainer) -> None:
        _refuse_other_decisions(trainer)

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        _refuse_other_decisions(trainer)
        if trainer.get_callback(StepGuard) is not None:
            raise ConfigError("callbacks has two TerminateOnNaN. Remove one.")
        self.reason = None
        _overrule(trainer, stack)
        self._guard = guard = StepGuard(
            trainer, self._judge, None, masks=True, gradients=self.check_gradients
        )
        stack.callback(setattr, self, "_guard", None)
        stack.callback(trainer.precision.check_step, None)  # of an interrupted step
        stack.callback(trainer.add_callback(guard).remove)

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        if not trainer.is_fitting:
            self.reason = None
            _overrule(trainer, stack)

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        if self.reason is not None:
            trainer.early_exit.stop_all(
                f"TerminateOnNaN stopped this run before: {self.reason}. To continue, remove the "
                f"callback or start from an earlier checkpoint"
            )

    @override
    def on_train_end(self, trainer: Trainer, model: Module, loop: Any, loop_idx: int) -> None:
        if self._guard is not None:
            self._guard.drop_batches()  # of a step interrupted by a stop

    # ---- findings

    def _judge(self, trainer: Trainer, found: StepFinding) -> None:
        if found.is_bad:
            self._stop(trainer, found.complaint)

    @override
    def on_validate_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        loss = outputs.get("loss")
        if isinstance(loss, Tensor):
            trainer.read((loss.detach().sum(),), partial(self._check_val, trainer))

    def _check_val(self, trainer: Trainer, values: list[Any]) -> None:
        if not math.isfinite(values[0]):
            step = trainer.global_step
            self._stop(trainer, f"the validation loss is {values[0]} at global_step {step}")

    def _stop(self, trainer: Trainer, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            log.error("Stopping the run: %s.", reason)
        trainer.early_exit.stop(f"TerminateOnNaN: {self.reason}")

    # ---- state

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        if ckpt_path is not None:
            self._is_foreign = not trainer.checkpoint.is_in_folder(trainer, ckpt_path)
            if self._guard is not None:
                self._guard.drop_batches()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that affects later steps."""
        guard = None if self._guard is None else self._guard.state()
        return {"reason": self.reason, "guard": guard}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; the stop of another run does not apply to this one."""
        self.reason = None if self._is_foreign else state["reason"]
        if self._guard is not None and state["guard"] is not None:
            self._guard.load_state(state["guard"])


def _refuse_other_decisions(trainer: Trainer) -> None:
    for other in trainer.get_callbacks(CheckLoss):
        if other.judges_steps:
            raise ConfigError(
                "callbacks has TerminateOnNaN and a CheckLoss that sets policy, check_gradients or "
                "spike_window: they contradict each other. Remove one of them."
            )


def _overrule(trainer: Trainer, stack: ExitStack) -> None:
    for other in trainer.get_callbacks(CheckLoss):
        stack.callback(setattr, other, "is_overruled", other.is_overruled)
        other.is_overruled = True
