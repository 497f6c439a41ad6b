"""Full precision: how the loss is differentiated and the parameters are updated."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback
from modelzoo_trainer.core.backend import Backend

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class Precision(CoreCallback):
    """Everything in the types that the model has; nothing is scaled or clipped."""

    _backend: Backend
    autocast: AbstractContextManager[Any] | None = None
    """The context of the forward pass, entered again and again; None = none."""

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        self._backend = trainer.backend

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Clip the gradients if asked for, and update the parameters."""
        self._backend.optimizer_step(optimizer)
