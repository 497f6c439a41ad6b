"""Whether an optimizer step is bad: found on the device, and acted on there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import Batch
from modelzoo_trainer.callbacks.loss_window import LossWindow
from modelzoo_trainer.callbacks.step_finding import Batches, StepFinding
from modelzoo_trainer.callbacks.step_losses import StepLosses, placed
from modelzoo_trainer.core.step_check import StepCheck

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

Report = Callable[["Trainer", StepFinding], None]


class StepGuard(StepLosses):
    """Judges each step by the mean loss of its batches and the norm of its gradients.

    A step is bad if one of them is not finite, or the loss is a spike. Whether it is, stays on the
    device; what was found is read late. A bad step can be left out: parameters, buffers and the
    optimizer's state are then what they were before its first batch, bit by bit. A buffer whose
    shape a batch has changed is not put back.

    Args:
        trainer: Whose steps they are.
        report: Called with each step's finding, when it is on the host.
        window: What decides about spikes; None = nothing.
        masks: Leave out bad steps, and log how many: `skipped_steps`.
        gradients: Look at the gradients; under a loss scaler they are the scaler's affair.

    State: The window's losses, the number of steps left out, and, within a step of several
        batches, what these have come to so far.

    Cost: No host read. A copy of the model's buffers a step if it masks; else see
        `Backend.optimizer_step`, `Backend.grad_norm` and `LossWindow`.
    """

    def __init__(
        self,
        trainer: Trainer,
        report: Report,
        window: LossWindow | None,
        *,
        masks: bool,
        gradients: bool,
    ) -> None:
        self._report: Final = report
        self._window: Final = window
        self._masks: Final = masks
        self._gradients: Final = gradients
        self._device = trainer.backend.device
        self._modules = [part for part in trainer.model.modules() if part._buffers]
        self._num_skipped = torch.zeros((), dtype=torch.int64, device=self._device)
        self.check: StepCheck | None = None
        """The look at the step at hand; None = between the optimizer steps."""
        self._loss: Tensor | None = None
        self._limit: Tensor | None = None
        super().__init__()

    @override
    def drop_batches(self) -> None:
        super().drop_batches()
        self._copies: list[Tensor | None] = []

    # ---- the batches of a step

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        if self._masks and not self._batches:
            self._copies = [None if own is None else own.clone() for own in self._buffers()]
        super().on_train_batch_start(trainer, model, batch, batch_idx)

    # ---- the step

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        self._loss = self.mean_loss(trainer)
        bad = self._loss.isfinite().logical_not()
        if self._window is not None:
            self._limit = self._window.limit()
            bad = bad | (self._loss > self._limit)
        self.check = StepCheck(bad, gradients=self._gradients, masks=self._masks)
        trainer.precision.check_step(self.check)

    @override
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        check, loss, limit = self.check, self._loss, self._limit
        assert check is not None  # made before the step
        assert loss is not None
        self.check = self._loss = self._limit = None
        if self._window is not None:
            self._window.add(loss, check.bad)
        if self._masks:
            self._num_skipped = self._num_skipped + check.bad
            self._restore_buffers(trainer, check.bad)
            trainer.log_metrics(skipped_steps=self._num_skipped)
        figures = {"loss": loss, "norm": check.norm, "limit": limit}
        known = {name: value for name, value in figures.items() if value is not None}
        arrive = partial(self._arrive, trainer, list(known), self._batches)
        trainer.read([check.bad, *known.values()], arrive)
        self.drop_batches()

    def _arrive(
        self, trainer: Trainer, names: list[str], batches: Batches, values: list[Any]
    ) -> None:
        figures = dict(zip(names, values[1:], strict=True))
        finding = StepFinding(
            step=trainer.global_step, is_bad=bool(values[0]), batches=batches, **figures
        )
        self._report(trainer, finding)

    def _buffers(self) -> list[Tensor | None]:
        return [buffer for part in self._modules for buffer in part._buffers.values()]

    def _restore_buffers(self, trainer: Trainer, bad: Tensor) -> None:
        pairs = [
            (own, copy)
            for own, copy in zip(self._buffers(), self._copies, strict=False)
            if own is not None and copy is not None and own.shape == copy.shape
        ]
        if pairs:
            owns, copies = zip(*pairs, strict=True)
            trainer.backend.restore(owns, copies, bad.logical_not())

    # ---- state

    def state(self) -> dict[str, Any]:
        """Return what decides about the steps to come."""
        state: dict[str, Any] = {"num_skipped": self._num_skipped}
        if self._window is not None:
            state["window"] = self._window.state_dict()
        if self._batches:
            state["open"] = {**self.open_batches(), "buffers": list(self._copies)}
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._num_skipped = state["num_skipped"].to(self._device)
        if self._window is not None and "window" in state:
            self._window.load_state_dict(state["window"])
        self.drop_batches()
        if "open" in state:
            part = state["open"]
            self.load_open_batches(part, self._device)
            self._copies = [placed(copy, self._device) for copy in part["buffers"]]
