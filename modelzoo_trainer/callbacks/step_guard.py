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

from modelzoo_trainer.callback import Batch, Callback, Outputs
from modelzoo_trainer.callbacks.loss_window import LossWindow
from modelzoo_trainer.callbacks.step_finding import Batches, StepFinding
from modelzoo_trainer.core.step_check import StepCheck

if TYPE_CHECKING:
    from modelzoo_trainer.core.backend import Backend
    from modelzoo_trainer.trainer import Trainer

Report = Callable[["Trainer", StepFinding], None]


class StepGuard(Callback):
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
        self._dtype = wide_type(trainer)
        self._modules = [part for part in trainer.model.modules() if part._buffers]
        self._num_skipped = torch.zeros((), dtype=torch.int64, device=self._device)
        self._check: StepCheck | None = None
        self._loss: Tensor | None = None
        self._limit: Tensor | None = None
        self.drop_batches()

    def drop_batches(self) -> None:
        """Forget the batches since the last step."""
        self._batches: Batches = []
        self._total: Any = 0.0
        self._weight: Any = 0
        self._copies: list[Tensor | None] = []

    # ---- the batches of a step

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        if self._masks and not self._batches:
            self._copies = [None if own is None else own.clone() for own in self._buffers()]
        data = trainer.data
        place = (data.epoch, data.batch_idx - data.ends_batch)
        if place not in self._batches:  # the parts of a batch have one
            self._batches.append(place)

    @override
    def on_after_backward(self, trainer: Trainer, model: Module, outputs: Outputs) -> None:
        loss = outputs["loss"].detach().reshape(()).to(self._dtype)
        accumulation = trainer.grad_accum
        if not accumulation.is_active:
            self._total, self._weight = loss, 1
            return
        weight = accumulation.weight
        self._total = self._total + loss * weight
        self._weight = self._weight + weight

    # ---- the step

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        self._loss = self._mean_loss(trainer.backend)
        bad = self._loss.isfinite().logical_not()
        if self._window is not None:
            self._limit = self._window.limit()
            bad = bad | (self._loss > self._limit)
        self._check = StepCheck(bad, gradients=self._gradients, masks=self._masks)
        trainer.precision.check_step(self._check)

    @override
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        check, loss, limit = self._check, self._loss, self._limit
        assert check is not None  # made before the step
        assert loss is not None
        self._check = self._loss = self._limit = None
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

    def _mean_loss(self, backend: Backend) -> Tensor:
        total: Tensor = self._total
        weight = self._weight
        if backend.world_size > 1:  # that of all: each of them has the same window
            counted = weight if isinstance(weight, Tensor) else torch.full_like(total, weight)
            total, weight = backend.reduce(torch.stack((total, counted.to(total)))).unbind()
        if isinstance(weight, Tensor):
            return total / weight.clamp_min(1)
        return total / weight if weight > 1 else total

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
            state["open"] = {
                "batches": [list(place) for place in self._batches],
                "total": self._total,
                "weight": self._weight,
                "buffers": list(self._copies),
            }
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._num_skipped = state["num_skipped"].to(self._device)
        if self._window is not None and "window" in state:
            self._window.load_state_dict(state["window"])
        self.drop_batches()
        if "open" in state:
            part = state["open"]
            self._batches = [(epoch, batch_idx) for epoch, batch_idx in part["batches"]]
            self._total, self._weight = self._placed(part["total"]), self._placed(part["weight"])
            self._copies = [self._placed(copy) for copy in part["buffers"]]

    def _placed(self, value: Any) -> Any:
        return value.to(self._device) if isinstance(value, Tensor) else value


def wide_type(trainer: Trainer) -> torch.dtype:
    """Return the type in which losses are summed up."""
    return torch.float64 if trainer.backend.caps.float64 else torch.float32
