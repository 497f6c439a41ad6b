"""The newest metrics, where a pass, a train stage or a validation ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Callback, Loader, Metrics

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.metrics")


_KEPT: Final = (int, float, str, Tensor)


class LogMetrics(Callback):
    """Tells the newest value of each metric where a pass, a train stage or a validation ends.

    Those of training come where a pass over the data or a train stage ends, those of a validation
    when it is complete; which of them a metric is, is decided by when it was logged, not by its
    name. Nothing is told twice. What callbacks behind this one log is not missed: it comes with the
    rest, or where the next pass, stage or validation ends.

    Subclass it and override `log_metrics` to send them somewhere else than to the log.

    State: The values of training that have not been told yet.
    """

    def __init__(self) -> None:
        self._train: Metrics = {}
        self._val: Metrics = {}
        self._num_validating = 0

    def log_metrics(self, trainer: Trainer, metrics: Metrics) -> None:
        """Take metrics; called in the first process only, with one at least.

        Args:
            trainer: The trainer.
            metrics: Names, with their scopes, and host values.
        """
        figures = " | ".join(f"{name} {_text(value)}" for name, value in metrics.items())
        log.info("step %d | %s", trainer.global_step, figures)

    # ---- what comes

    @override
    def on_metrics(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        (self._val if self._num_validating else self._train).update(metrics)

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._train = {}

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        self._begin_validation(trainer, stack)

    @override
    def on_enter_validate_all(
        self,
        trainer: Trainer,
        stack: ExitStack,
        val_dataloaders: list[Loader],
        loop: Any,
        ckpt_paths: list[Any],
    ) -> None:
        self._begin_validation(trainer, stack)

    def _begin_validation(self, trainer: Trainer, stack: ExitStack) -> None:
        if not self._num_validating:
            self._tell_training(trainer)  # a run that resumes here has not told it yet
        self._num_validating += 1

        def leave(kind: type[BaseException] | None, *rest: object) -> None:
            if kind is None:
                trainer.drain()  # what validations of one's own have logged
            self._num_validating -= 1
            metrics, self._val = self._val, {}
            self._tell(trainer, metrics)

        stack.push(leave)

    # ---- what is told

    @override
    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self._tell_training(trainer)

    @override
    def on_train_end(self, trainer: Trainer, model: Module, loop: Any, loop_idx: int) -> None:
        self._tell_training(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        self._tell_training(trainer)

    def _tell_training(self, trainer: Trainer) -> None:
        trainer.drain()
        metrics, self._train = self._train, {}
        self._tell(trainer, metrics)

    def _tell(self, trainer: Trainer, metrics: Metrics) -> None:
        if metrics and trainer.backend.is_main and trainer.backend.caps.holds_values:
            self.log_metrics(trainer, metrics)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return what has not been told yet."""
        kept = {key: value for key, value in self._train.items() if isinstance(value, _KEPT)}
        return {"train": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._train = dict(state["train"])


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, Real) else str(value)
