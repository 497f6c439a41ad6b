"""Several batches to one optimizer step."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import Batch, CoreCallback, Loader, Outputs
from modelzoo_trainer.data.batches import batch_size_of

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

Weight = int | float | Tensor


class GradientAccumulation(CoreCallback):
    r"""Decides which batch takes the optimizer step, and weighs the batches before it.

    The gradient of a window is $\sum_i w_i g_i / \sum_i w_i$, that of one batch made of all of
    them: $w_i$ is the number of samples, or `num_items` (tokens) if the model's output has it. As
    the sum is not known before the last batch, losses are divided by $n w_1 / w_i$ with $n$ batches
    a window, and gradients corrected at the end where that was not it; equal batches in a full
    window are simply divided by $n$. The last window of a pass may be short; it is stepped too.

    A batch of the loader that is split into micro-batches counts as all of these.

    Args:
        num: Batches of the loader per optimizer step.
    """

    def __init__(self, num: int = 1) -> None:
        self.num = num
        self.is_active = num > 1
        self.should_run_optimizer_step = True
        self.weight: Weight = 1
        self._num_whole = 0
        self._expected = num
        self._count = 0
        self._first: Weight = 0
        self._sum: Weight = 0
        self._is_even = True
        if not self.is_active:
            self.idle_hooks = frozenset(
                {"on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"}
            )

    def activate(self) -> None:
        """Accumulate whatever `num` is, as batches come in parts; the hook table is made anew."""
        self.is_active = True
        self.idle_hooks = frozenset()

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        stack.callback(self._drop, trainer)

    def _drop(self, trainer: Trainer) -> None:
        """Forget a step that an exception cut off."""
        if trainer.has_optimizer:
            trainer.backend.zero_grad(trainer.optimizer)
        self._reset()
        self.should_run_optimizer_step = True

    def _reset(self) -> None:
        self._count = self._num_whole = 0
        self._first = self._sum = 0
        self._is_even = True

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        data = trainer.data
        if not self._count:
            self._expected = self.num * data.num_parts
        self._count += 1
        self._num_whole += data.ends_batch
        self.should_run_optimizer_step = self._num_whole >= self.num or data.is_last

    def scale(self, loss: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the loss as this batch's share of its window.

        Cost: No host read.
        """
        weight = weight_of(outputs, batch)
        if isinstance(weight, Tensor):  # a quotient of whole numbers would be float32
            weight = weight.to(torch.promote_types(loss.dtype, torch.float32))
        self.weight = weight
        if self._count == 1:
            self._first = _at_least_one(weight)
        self._sum = self._sum + weight
        if isinstance(weight, Tensor) or isinstance(self._first, Tensor):
            self._is_even = False
            return loss * (weight / (self._first * self._expected))
        if weight == self._first:
            return loss / self._expected
        self._is_even = False
        return loss * (weight / (self._first * self._expected))

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        if not (self._is_even and self._count == self._expected):
            factor = self._first * self._expected / _at_least_one(self._sum)
            grads = [
                param.grad
                for group in optimizer.param_groups
                for param in group["params"]
                if param.grad is not None
            ]
            if grads:
                torch._foreach_mul_(grads, factor)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        if self.should_run_optimizer_step:
            self._reset()


def weight_of(outputs: Outputs, batch: Batch) -> Weight:
    """Return what a batch counts: `num_items` of the model's output, else its samples."""
    items = outputs.get("num_items")
    if items is None:
        return batch_size_of(batch)
    return items.detach() if isinstance(items, Tensor) else items


def _at_least_one(weight: Weight) -> Weight:
    return weight.clamp_min(1) if isinstance(weight, Tensor) else max(weight, 1)
