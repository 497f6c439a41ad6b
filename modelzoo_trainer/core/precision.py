"""Full precision: how the loss is differentiated and the parameters are updated."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback
from modelzoo_trainer.core.step_check import StepCheck
from modelzoo_trainer.devices import Backend

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class Precision(CoreCallback):
    """Everything in the types that the model has; nothing is scaled or clipped."""

    _backend: Backend
    autocast: AbstractContextManager[Any] | None = None
    """The context of the forward pass, entered again and again; None = none."""
    _check: StepCheck | None = None

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        self._backend = trainer.backend

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients."""
        self._backend.backward(loss)

    def check_step(self, check: StepCheck | None) -> None:
        """Have the step at hand checked; called in `on_before_optimizer_step`.

        Args:
            check: Its results are there when the step was taken. None = no check after all.
        """
        self._check = check

    def overflows(self, optimizer: Optimizer) -> list[Tensor]:
        """Return what a loss scaler has found in the gradients of the step at hand.

        Returns:
            On the device, each with one element, > 0 if the scaler leaves the step out; empty
            where there is no scaler.
        """
        return []

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Clip the gradients if asked for, and update the parameters."""
        check = self._check
        if check is None:
            self._backend.optimizer_step(optimizer)
            return
        self._check = None
        params = parameters_of(optimizer)
        check.settle(self._backend, self._backend.grad_norm(params) if check.gradients else None)
        self._backend.optimizer_step(optimizer, check.bad.logical_not() if check.masks else None)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]
