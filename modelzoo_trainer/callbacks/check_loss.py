"""Handling of non-finite losses and loss spikes."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import KW_ONLY
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.base.constraints import FinitePositiveFloat, PositiveInt, checked_dataclass
from modelzoo_trainer.callback import Batch, Callback, Loader, Outputs, StateDict
from modelzoo_trainer.callbacks.step_guard import (
    RecentLosses,
    StepFinding,
    StepGuard,
    named,
    wide_type,
)
from modelzoo_trainer.errors import ConfigError, RollBack

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.check_loss")

Policy = Literal["raise", "skip", "rollback"]
_TO_SKIP: Final = "Decrease the learning rate, or skip such steps: CheckLoss(policy='skip')."


@checked_dataclass
class CheckLoss(Callback):
    """Raise, skip the step or roll back when the loss is NaN, infinite or a spike.

    Nothing waits for the device: a bad step may be reported some steps later, with its own step
    number. No checkpoint is written in between.

    * `raise` ends the run with an error.
    * `skip` discards the step: weights, buffers and the optimizer state stay bit by bit as they
      were before its first batch; schedules, `global_step` and updates of sparsity masks proceed.
      This is decided on the device, so a step is skipped however late it is reported.
    * `rollback` goes back to the newest checkpoint of the run from before the first batch of the
      bad step and continues without the batches of that step (as Chowdhery et al. 2022, PaLM,
      section 5.1, did manually).

    A non-finite validation loss ends the run with an error under each policy: there is no step to
    skip or to undo.

    A loss is a spike if it is more than `spike_threshold` robust standard deviations (1.4826 times
    the median absolute deviation) above the median of the last `spike_window` good losses; there
    are no spikes before there are that many. With normally distributed losses, six of them occur
    once in 10^9 steps; small batches have heavier tails.

    Args:
        policy: What to do with a bad step.
        check_gradients: Whether a non-finite gradient norm makes a step bad as well; None = with
            `skip` and `rollback`. Not with a loss scaler, which skips such steps itself.
        spike_window: Number of losses to compare with, >= 8; None = ignore spikes.
        spike_threshold: Robust standard deviations above the median at which a spike begins, > 0.
        max_skips: Maximum number of consecutive skipped steps; the next bad one ends the run.
        max_rollbacks: Maximum number of consecutive rollbacks without a good step beyond the bad
            ones.

    Metrics:
        skipped_steps: With `skip`, number of steps of the run that were skipped so far.

    State: The last finite losses, the losses of the window, and the counts.

    Raises:
        ConfigError: If an argument is invalid.
        FloatingPointError: During the run, with the step and the last finite loss before it.

    Cost: `raise` alone is negligible. Spikes: a sort of the window in each step. Gradients: their
        norm, unless it is computed for clipping. `skip`: also a copy of the buffers, and the cost
        given in `Backend.optimizer_step`.
    """

    needs_trainer = True

    handles_bad_losses = True
    is_overruled = False
    """Whether `TerminateOnNaN` ends the run instead, so that nothing is raised."""

    policy: Policy = "raise"
    _: KW_ONLY
    check_gradients: bool | None = None
    spike_window: PositiveInt | None = None
    spike_threshold: FinitePositiveFloat = 6.0
    max_skips: PositiveInt = 10
    max_rollbacks: PositiveInt = 3

    def __post_init__(self) -> None:
        if self.spike_window is not None and self.spike_window < 8:
            raise ConfigError(
                f"CheckLoss.spike_window is {self.spike_window}; detecting a spike requires at "
                f"least 8 losses. Use 8 or more, or None (null) to ignore spikes."
            )
        if self.check_gradients is None:
            self.check_gradients = self.policy != "raise"
        self._guard: StepGuard | None = None
        self._reset()

    @property
    def judges_steps(self) -> bool:
        """Whether whole steps are checked (policy, gradients or spikes), not single losses."""
        return self.policy != "raise" or self.check_gradients or self.spike_window is not None

    def _reset(self) -> None:
        self._last_train: tuple[float, int] | None = None
        self._last_val: tuple[float, int] | None = None
        self._num_skips = 0
        self._num_rollbacks = 0
        self._bad_step = 0
        self._is_rolling_back = False

    # ---- fit

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
        if self.judges_steps:
            if trainer.manual_steps is not None:
                raise ConfigError(
                    "CheckLoss: policy, check_gradients and spike_window require a single "
                    "optimizer, but the trainer has several. Use CheckLoss() with its defaults."
                )
            if trainer.get_callback(StepGuard) is not None:
                raise ConfigError(
                    "There are two CheckLoss callbacks with policy, check_gradients or "
                    "spike_window. Merge them into one."
                )
            self._guard = guard = StepGuard(
                trainer,
                self._judge,
                self._make_window(trainer),
                masks=self.policy == "skip",
                gradients=bool(self.check_gradients),
            )
            stack.callback(setattr, self, "_guard", None)
            stack.callback(trainer.precision.check_step, None)  # of an interrupted step
            stack.callback(trainer.add_callback(guard).remove)

    def _make_window(self, trainer: Trainer) -> RecentLosses | None:
        if self.spike_window is None:
            return None
        device, dtype = trainer.backend.device, wide_type(trainer)
        return RecentLosses(self.spike_window, self.spike_threshold, device, dtype)

    @override
    def on_train_end(self, trainer: Trainer, model: Module, loop: Any, loop_idx: int) -> None:
        if self._guard is not None:
            self._guard.drop_batches()  # of a step interrupted by a stop

    # ---- findings

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        if self._guard is not None:
            return
        loss = _loss_in(outputs)
        if loss is None:
            return
        is_at_hand = trainer.backend.reads_at_once and loss.ndim == 0
        if is_at_hand and math.isfinite(value := loss.item()):
            self._last_train = (value, trainer.global_step)
        else:
            trainer.read((loss,), partial(self._check_train, trainer))

    @override
    def on_validate_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        loss = _loss_in(outputs)
        if loss is not None:
            trainer.read((loss,), partial(self._check_val, trainer))

    def _check_train(self, trainer: Trainer, values: list[Any]) -> None:
        loss = _number(values[0])
        if not math.isfinite(loss):
            if self.is_overruled:
                return
            what = f"loss is {loss} at global_step {trainer.global_step}"
            raise _error(what, self._last_train, _TO_SKIP)
        self._last_train = (loss, trainer.global_step)

    def _check_val(self, trainer: Trainer, values: list[Any]) -> None:
        loss = _number(values[0])
        if not math.isfinite(loss):
            if self.is_overruled:
                return
            what = f"{trainer.name_scope_path}loss is {loss} at global_step {trainer.global_step}"
            raise _error(what, self._last_val)
        self._last_val = (loss, trainer.global_step)

    def _judge(self, trainer: Trainer, found: StepFinding) -> None:
        if self._is_rolling_back:  # steps that will be undone
            return
        if not found.is_bad:
            self._last_train = (found.loss, found.step)
            self._num_skips = 0
            if found.step >= self._bad_step:
                self._num_rollbacks = 0
            return
        error = _error(found.complaint, self._last_train)
        if self.policy == "skip":
            self._skip(found, error)
        elif self.policy == "rollback":
            self._roll_back(found, error)
        else:
            raise error

    def _skip(self, found: StepFinding, error: FloatingPointError) -> None:
        self._num_skips += 1
        if self._num_skips > self.max_skips:
            error.add_note(
                f"The previous {self.max_skips} steps were all skipped (CheckLoss.max_skips), so "
                f"bad batches are probably not the cause. Check the learning rate, the precision "
                f"and the model."
            )
            raise error
        log.warning("Skipped a step: %s.", found.complaint)

    def _roll_back(self, found: StepFinding, error: FloatingPointError) -> None:
        self._bad_step = max(found.step, self._bad_step)
        self._num_rollbacks += 1
        if self._num_rollbacks > self.max_rollbacks:
            error.add_note(
                f"The run rolled back {self.max_rollbacks} times in a row "
                f"(CheckLoss.max_rollbacks), so the data is probably not the cause. Check the "
                f"learning rate, the precision and the model."
            )
            raise error
        self._is_rolling_back = True
        message = f"{found.complaint}. Rolling back and skipping {named(found.batches)}."
        log.warning("%s", message)
        raise RollBack(message, step=found.step, batches=found.batches, cause=error)

    # ---- state

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        if ckpt_path is not None and self._guard is not None:
            self._guard.drop_batches()

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        self._is_rolling_back = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state that affects later steps."""
        return {
            "last_train": self._last_train,
            "last_val": self._last_val,
            "num_skips": self._num_skips,
            "num_rollbacks": self._num_rollbacks,
            "bad_step": self._bad_step,
            "guard": None if self._guard is None else self._guard.state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state; the number of rollbacks is kept across a rollback."""
        self._last_train = _pair(state_dict["last_train"])
        self._last_val = _pair(state_dict["last_val"])
        self._num_skips = state_dict["num_skips"]
        if not self._is_rolling_back:
            self._num_rollbacks = state_dict["num_rollbacks"]
            self._bad_step = state_dict["bad_step"]
        if self._guard is not None and state_dict["guard"] is not None:
            self._guard.load_state(state_dict["guard"])


def _pair(value: Any) -> tuple[float, int] | None:
    return None if value is None else (value[0], value[1])


def _loss_in(outputs: Any) -> Tensor | None:
    """Return the loss in the outputs of a step; a custom `training_step` may return anything."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or loss.is_complex():
        return None
    return loss if loss is not outputs or loss.numel() == 1 else None


def _number(value: Any) -> float:
    """Return a loss as a number; several values are finite if all of them are."""
    return float(value.double().sum()) if isinstance(value, Tensor) else value


def _error(what: str, last: tuple[float, int] | None, advice: str = "") -> FloatingPointError:
    before = "There was no finite loss before."
    if last is not None:
        before = f"Last finite loss: {last[0]:.6g} at step {last[1]}."
    return FloatingPointError(f"{what}. {before} {advice}".rstrip())
