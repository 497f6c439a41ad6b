"""Ends a run when a metric no longer improves."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Callback, Loader, Metrics
from modelzoo_trainer.callbacks.metric_watch import MetricName, MetricWatch
from modelzoo_trainer.constraints import NonNegativeFloat, PositiveInt, checked

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.early_stopping")


class EarlyStopping(Callback):
    """Ends a run in order when a metric has not improved for some of its values.

    A value improves if it is better than the best one by more than `min_delta`. One that is not
    finite does not. The first finite value is the best one so far. The run ends at a step boundary
    or, if the value is that of a validation, when the validation is complete; other callbacks have
    seen the value by then, whatever their order. A run that has ended so ends again at once when it
    is resumed, unless `patience` was raised or the callback taken out.

    On devices that deliver late, a metric of training steps ends the run some steps late. Of a
    metric that each process has for itself, that of the main process counts.

    Args:
        metric: Its name as the loggers see it, such as `validate_0/loss`.
        mode: Whether the least or the greatest value is best.
        patience: The run ends after this many values in a row that do not improve, > 0.
        min_delta: How much better a value must be, >= 0.
        reset_on_fit: Whether each fit starts afresh; False = continues from the previous
            one. A fit that resumes from a checkpoint of the run does so in any case.
        verbose: Whether each value is logged.

    State: The best value, its step, and the number of values since.

    Raises:
        ConfigError: If an argument does not fit; when the metric arrives, if it is not a number.
    """

    needs_trainer = True

    state_is_of_run = True

    @checked()
    def __init__(
        self,
        metric: MetricName,
        mode: Literal["min", "max"] = "min",
        patience: PositiveInt = 3,
        min_delta: NonNegativeFloat = 0.0,
        reset_on_fit: bool = True,
        verbose: bool = False,
    ) -> None:
        self._watch = MetricWatch("EarlyStopping", metric)
        self.mode = mode
        self.patience = patience
        self.min_delta = min_delta
        self.reset_on_fit = reset_on_fit
        self._level = logging.INFO if verbose else logging.DEBUG
        self._forget()

    def _forget(self) -> None:
        self.best: float | None = None
        """The best value so far; None = there is none."""
        self.best_step = 0
        """The step that it belongs to."""
        self.num_waited = 0
        """Number of values in a row that have not improved."""

    @property
    def metric(self) -> str:
        """Which metric decides."""
        return self._watch.metric

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
        self._watch.begin()
        if self.reset_on_fit:
            self._forget()

    @override
    def on_metrics(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        if not trainer.is_fitting or not trainer.backend.caps.holds_values:
            return
        value = self._watch.value_in(metrics)
        if value is None:
            return
        if self._improves(value):
            self.best, self.best_step, self.num_waited = value, step, 0
            log.log(self._level, "%s improves to %.6g at step %d.", self.metric, value, step)
            return
        self.num_waited += 1
        log.log(
            self._level,
            "%s is %.6g at step %d, no better than %s: %d of %d.",
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
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

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
        trainer.drain()  # what validations have logged
        self._watch.warn_if_missing()
        self._stop_all_if_due(trainer)

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
        return (
            f"EarlyStopping: {self.metric} has had {self.num_waited} values no better than "
            f"{self._described()}"
        )

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        trainer.drain()
        if self._watch.hint and self.best is None:
            log.warning(
                "EarlyStopping: no metric %r was logged, so nothing could end the run early. %s",
                self.metric,
                self._watch.hint,
            )

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return how long it has waited for what."""
        return {"best": self.best, "best_step": self.best_step, "num_waited": self.num_waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on waiting."""
        self.best = state["best"]
        self.best_step = state["best_step"]
        self.num_waited = state["num_waited"]
