"""The loss as it is logged: unscaled, averaged over what it stands for."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, CoreCallback, Loader, Outputs, StateDict
from modelzoo_trainer.core.backend import map_tensors
from modelzoo_trainer.core.grad_accum import weight_of

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class Mean:
    """A weighted mean on the device, in double precision where the device has it."""

    def __init__(self, *, double: bool) -> None:
        self._dtype = torch.float64 if double else torch.float32
        self._sum: Tensor | None = None
        self._weight: Any = 0

    def add(self, value: Tensor, weight: Any) -> None:
        """Add a value without dimensions, with its weight."""
        term = value.detach().to(self._dtype) * weight
        self._sum = term if self._sum is None else self._sum + term
        self._weight = self._weight + weight

    def take(self) -> Tensor | None:
        """Return the mean and start anew; None if nothing was added."""
        mean = None if self._sum is None else self._sum / self._weight
        self._sum, self._weight = None, 0
        return mean

    def state_dict(self) -> dict[str, Any] | None:
        """Return what was added so far, all bits of it; None if nothing was."""
        return None if self._sum is None else {"sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any] | None, device: torch.device) -> None:
        """Go on from what `state_dict` returned.

        Args:
            state: That.
            device: Where what is added will be.
        """
        self.take()
        if state is not None:
            found = map_tensors(state, lambda tensor: tensor.to(device, copy=True))
            self._sum, self._weight = found["sum"].to(self._dtype), found["weight"]


class LossAccumulation(CoreCallback):
    """Logs `loss`: of each logged step, and of a validation as a whole.

    The average over the batches of a step and over a validation is weighted by samples, or by
    `num_items` if the model's output has it. Of a validation that was cut short nothing is logged.

    Args:
        num: Batches per optimizer step.

    State: `loss_accum`, in the middle of a step alone: the average so far.
    """

    def __init__(self, num: int = 1) -> None:
        if num == 1:
            self.log_step_hooks = frozenset({"on_train_step_end"})
        self._train = Mean(double=True)
        self._val = Mean(double=True)

    def activate(self) -> None:
        """Average whatever `num` is, as batches come in parts; the hook table is made anew."""
        self.log_step_hooks = frozenset()

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        double = trainer.backend.caps.float64
        self._train, self._val = Mean(double=double), Mean(double=double)

    @override
    def on_enter_train(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        stack.callback(self._train.take)

    @override
    def on_train_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        if not trainer.grad_accum.is_active:
            trainer.log_metrics_dict({"loss": outputs["loss"].detach()})
            return
        if (
            not trainer.logging.is_log_window
            and trainer.schedule.total_steps is not None
            and not trainer.rehearses
        ):
            return  # of a run without a known end, any window may be the last and be logged
        self._train.add(outputs["loss"], trainer.grad_accum.weight)
        if trainer.should_run_optimizer_step:
            trainer.log_metrics(loss=self._train.take())

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        stack.callback(self._val.take)

    @override
    def on_validate_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        if "loss" in outputs:
            self._val.add(outputs["loss"], weight_of(outputs, batch))

    @override
    def on_validate_end(self, trainer: Trainer, model: Module, loop: Any) -> None:
        mean = self._val.take()
        if mean is not None and trainer.val_is_complete:
            trainer.log_metrics(loss=mean)

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        mean = self._train.state_dict()
        if mean is not None:
            state_dict["loss_accum"] = trainer.backend.state_view(mean)

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        mean = state_dict.get("loss_accum") if trainer.grad_accum.is_active else None
        self._train.load_state_dict(mean, trainer.backend.device)
