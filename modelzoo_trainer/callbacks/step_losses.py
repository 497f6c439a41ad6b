"""The loss of an optimizer step and the batches that it is of, collected on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Outputs
from modelzoo_trainer.callbacks.step_finding import Batches

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class StepLosses(Callback):
    """Collects the loss of a step: the mean over its batches, of all processes.

    Cost: No host read; with several processes a reduction of two numbers a step.
    """

    needs_trainer = True

    def __init__(self) -> None:
        self.drop_batches()

    def drop_batches(self) -> None:
        """Forget the batches since the last step."""
        self._batches: Batches = []
        self._total: Any = 0.0
        self._weight: Any = 0

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        data = trainer.data
        place = (data.epoch, data.batch_idx - data.ends_batch)
        if place not in self._batches:  # the parts of a batch have one
            self._batches.append(place)

    @override
    def on_after_backward(self, trainer: Trainer, model: Module, outputs: Outputs) -> None:
        loss = outputs["loss"].detach().reshape(()).to(wide_type(trainer))
        accumulation = trainer.grad_accum
        if not accumulation.is_active:
            self._total, self._weight = loss, 1
            return
        weight = accumulation.weight
        self._total = self._total + loss * weight
        self._weight = self._weight + weight

    def mean_loss(self, trainer: Trainer) -> Tensor:
        """Return the loss of the step, equal on all processes. Collective."""
        backend = trainer.backend
        total: Tensor = self._total
        weight = self._weight
        if backend.world_size > 1:
            counted = weight if isinstance(weight, Tensor) else torch.full_like(total, weight)
            total, weight = backend.reduce(torch.stack((total, counted.to(total)))).unbind()
        if isinstance(weight, Tensor):
            return total / weight.clamp_min(1)
        return total / weight if weight > 1 else total

    def open_batches(self) -> dict[str, Any]:
        """Return what the batches since the last step have come to, to save it."""
        return {
            "batches": [list(place) for place in self._batches],
            "total": self._total,
            "weight": self._weight,
        }

    def load_open_batches(self, part: dict[str, Any], device: torch.device) -> None:
        """Restore what `open_batches` returned."""
        self._batches = [(epoch, batch_idx) for epoch, batch_idx in part["batches"]]
        self._total, self._weight = placed(part["total"], device), placed(part["weight"], device)


def placed(value: Any, device: torch.device) -> Any:
    """Return a value that a checkpoint held, on the device if it is a tensor."""
    return value.to(device) if isinstance(value, Tensor) else value


def wide_type(trainer: Trainer) -> torch.dtype:
    """Return the type in which losses are summed up."""
    return torch.float64 if trainer.backend.caps.float64 else torch.float32
