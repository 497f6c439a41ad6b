"""Early stopping by a metric."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.base.constraints import NonNegativeFloat, PositiveInt, checked_dataclass
from modelzoo_trainer.base.metric_direction import Direction, is_better
from modelzoo_trainer.callback import Callback, Loader, Metrics
from modelzoo_trainer.callbacks.parts.metric_watch import MetricName, MetricWatch

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.early_stopping")


@checked_dataclass
class EarlyStopping(Callback):
    """Stop training when a metric stops improving.

    A value improves if it is better than the best one by more than `min_delta`; a non-finite value
    does not. The first finite value becomes the best one. The run stops gracefully at a step
    boundary or, for a validation metric, at the end of the validation; other callbacks have
    received the value by then, whatever their order. A run stopped this way stops again at once
    when it is resumed, unless `patience` was increased or the callback removed.

    On devices that are read asynchronously, a training metric stops the run some steps later. If a
    metric differs between processes, the value of the main process is used.

    Args:
        metric: Name of the metric as loggers receive it, such as `validate_0/loss`.
        mode: Whether a smaller ("min") or a larger ("max") value is better; None = by the name:
            "max" for accuracy, F1, AUC and the like, otherwise "min".
        patience: Number of consecutive values without improvement after which to stop, > 0.
        min_delta: Minimum improvement, >= 0; a relative one of a millionth is always required.
        reset_on_fit: Whether to reset the state in each fit; False = continue from the previous
            one. A fit that resumes from a checkpoint of the run never resets it.
        verbose: Whether to log each value.

    State: The best value, its step, and the number of values since.

    Raises:
        ConfigError: If an argument is invalid; when the metric is logged, if it is not a number.
    """

    needs_trainer = True

    state_is_of_run = True

    with_one_value = "early stopping has no effect"
    """The effect if the metric is logged only at the end, for a hint."""

    metric: MetricName
    mode: Direction | None = None
    patience: PositiveInt = 3
    min_delta: NonNegativeFloat = 0.0
    reset_on_fit: bool = True
    verbose: bool = False

    def __post_init__(self) -> None:
        self._watch = MetricWatch("EarlyStopping", self.metric)
        self.mode = self._mode = self._watch.mode_or_default(self.mode)
        self._level = logging.INFO if self.verbose else logging.DEBUG
        self._reset()

    def _reset(self) -> None:
        self.best: float | None = None
        """The best value so far; None = there is none."""
        self.best_step = 0
        """Step of the best value."""
        self.num_waited = 0
        """Number of consecutive values without improvement."""

    # ---- values

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._watch.begin(trainer.summary.unlogged)
        if self.reset_on_fit:
            self._reset()

    @override
    def on_metrics(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        if not trainer.is_fitting or not trainer.backend.caps.holds_values:
            return
        value = self._watch.value_in(metrics)
        if value is None:
            return
        if self._improves(value):
            self.best, self.best_step, self.num_waited = value, step, 0
            log.log(self._level, "%s improved to %.6g at step %d.", self.metric, value, step)
            return
        self.num_waited += 1
        log.log(
            self._level,
            "%s did not improve: %.6g at step %d (best: %s; patience: %d of %d).",
            self.metric,
            value,
            step,
            self._described(),
            self.num_waited,
            self.patience,
        )

    def _improves(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return self.best is None or is_better(value, self.best, self._mode, self.min_delta)

    def _described(self) -> str:
        return "none" if self.best is None else f"{self.best:.6g} at step {self.best_step}"

    # ---- the end

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._stop_all_if_due(trainer)

    @override
    def on_train_start(
        self,
        trainer: Trainer,
        model: Module,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        trainer.drain()  # read the metrics of validations
        self._watch.warn_if_missing()
        self._stop_all_if_due(trainer)

    @override
    def on_validate_end(self, trainer: Trainer, model: Module, loop: Any) -> None:
        self._watch.note_validation(trainer)

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        if self.num_waited >= self.patience and trainer.backend.comm.is_main:
            trainer.early_exit.stop(self._reason())

    def _stop_all_if_due(self, trainer: Trainer) -> None:
        reason = self._reason() if self.num_waited >= self.patience else None
        if trainer.backend.caps.holds_values:
            reason = trainer.backend.comm.broadcast_object(reason)
        if reason is not None:
            trainer.early_exit.stop_all(reason)

    def _reason(self) -> str:
        values = "value" if self.num_waited == 1 else "values"
        return (
            f"EarlyStopping: {self.metric} has not improved for {self.num_waited} {values} "
            f"(best: {self._described()})"
        )

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        trainer.drain()
        if self._watch.hint and self.best is None and self._watch.had_time(trainer):
            log.warning(
                "EarlyStopping: no metric %r was logged, so early stopping had no effect. %s",
                self.metric,
                self._watch.hint,
            )

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its step and the number of values since."""
        return {"best": self.best, "best_step": self.best_step, "num_waited": self.num_waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self.best = state["best"]
        self.best_step = state["best_step"]
        self.num_waited = state["num_waited"]
