"""Stops a run gracefully when its loss is not finite."""

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
    """Ends a run in order when the loss of a training or validation step is NaN or infinite.

    In order means: end hooks are called and the final checkpoint is written; nothing is raised. The
    bad step is skipped, which is decided on the device: weights, buffers and the optimizer's state
    are what they were before its first batch, bit by bit. Schedules and `global_step` count it. On
    devices that deliver late, the good ones of a few steps after it are taken.

    A run that has ended so ends again at once when it is resumed. To continue, remove the callback
    or name an earlier checkpoint.

    Beside `CheckLoss` with its defaults (which every YAML file has) this one decides: nothing is
    raised. `CheckLoss` with another policy, gradients or spikes is refused: that decides otherwise.

    Args:
        check_gradients: Whether gradients whose norm is not finite make a step bad as well. Under
            a loss scaler they do not: it leaves those steps out.

    Metrics:
        skipped_steps: Number of steps that were skipped; 0 until the end is near.

    State: Why the run was ended; within a step of several batches what these have come to so far.

    Raises:
        ConfigError: When a trainer or a fit begins, if a `CheckLoss` decides otherwise.

    Cost: As `CheckLoss("skip")`: a masked update, a copy of the buffers, the gradients' norm.
    """

    needs_trainer = True
    needs_one_optimizer = True

    def __init__(self, check_gradients: bool = True) -> None:
        self.check_gradients = check_gradients
        self.reason: str | None = None
        """Why the run was ended; None = it was not."""
        self._guard: StepGuard | None = None
        self._is_foreign = False

    # ---- the length of a run

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
            raise ConfigError("callbacks has two TerminateOnNaN. One is enough.")
        self.reason = None
        _overrule(trainer, stack)
        self._guard = guard = StepGuard(
            trainer, self._judge, None, masks=True, gradients=self.check_gradients
        )
        stack.callback(setattr, self, "_guard", None)
        stack.callback(trainer.precision.check_step, None)  # of a step that was cut off
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
                f"TerminateOnNaN has ended it before: {self.reason}. To go on, take the callback "
                f"out or name an earlier checkpoint"
            )

    @override
    def on_train_end(self, trainer: Trainer, model: Module, loop: Any, loop_idx: int) -> None:
        if self._guard is not None:
            self._guard.drop_batches()  # of a step that a stop has cut off

    # ---- what was found

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
            self._stop(trainer, f"the loss of a validation is {values[0]} at global_step {step}")

    def _stop(self, trainer: Trainer, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            log.error("Ending the run: %s.", reason)
        trainer.early_exit.stop(f"TerminateOnNaN: {self.reason}")

    # ---- state

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        if ckpt_path is not None:
            self._is_foreign = not trainer.checkpoint.is_in_folder(trainer, ckpt_path)
            if self._guard is not None:
                self._guard.drop_batches()

    def state_dict(self) -> dict[str, Any]:
        """Return what decides about the steps to come."""
        guard = None if self._guard is None else self._guard.state()
        return {"reason": self.reason, "guard": guard}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it; the end of another run, whose checkpoint this one begins with, is none."""
        self.reason = None if self._is_foreign else state["reason"]
        if self._guard is not None and state["guard"] is not None:
            self._guard.load_state(state["guard"])


def _refuse_other_decisions(trainer: Trainer) -> None:
    for other in trainer.get_callbacks(CheckLoss):
        if other.judges_steps:
            raise ConfigError(
                "callbacks has TerminateOnNaN and a CheckLoss with a policy, gradients or spikes "
                "of its own: each decides what becomes of a bad step. Take one of them out."
            )


def _overrule(trainer: Trainer, stack: ExitStack) -> None:
    for other in trainer.get_callbacks(CheckLoss):
        stack.callback(setattr, other, "is_overruled", other.is_overruled)
        other.is_overruled = True
