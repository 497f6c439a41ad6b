"""Gradient accumulation: several batches per optimizer step."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.base.devices import map_tensors
from modelzoo_trainer.callback import Batch, CoreCallback, Loader, Outputs, StateDict
from modelzoo_trainer.errors import CheckpointError, CheckpointMismatch, ConfigError
from modelzoo_trainer.loading.batches import batch_size_of

if TYPE_CHECKING:
    from modelzoo_trainer.base.devices import Backend
    from modelzoo_trainer.core.dataloader import DataLoaderCallback
    from modelzoo_trainer.core.logging import Logging
    from modelzoo_trainer.core.run_schedule import RunSchedule
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.grad_accum")

Weight = int | float | Tensor


class GradientAccumulation(CoreCallback):
    r"""Decide which batch ends an accumulation window, and weight the batches of the window.

    The gradient of a window is $\sum_i w_i g_i / \sum_i w_i$, as for one large batch of all its
    samples: $w_i$ is the number of samples, or `num_items` (tokens) if the model's output has it.
    As the sum is not known before the last batch, losses are divided by $n w_1 / w_i$ with $n$
    batches per window, and gradients are corrected at the end if needed; equal batches in a full
    window are simply divided by $n$. The last window of an epoch may be shorter.

    A batch that is split into micro-batches counts as one.

    With several processes, the window spans all of them. Gradients are averaged over processes; if
    weights may differ, losses are multiplied by $w_i / (c n)$ with a common $c$, and the average is
    divided by the average of the weights. If each batch is a window and all processes have the same
    number of samples, nothing is computed. A model replicated in float32 or float64 sends its
    weights along with its gradients; otherwise an extra message of one number is sent.

    Args:
        num: Batches of the loader per optimizer step.

    State: `grad_accum`, within a window only: its counts and weights so far, and the gradients by
        parameter name.
    """

    def __init__(self, num: int = 1) -> None:
        self.num = num
        self.is_active = num > 1
        self.counts_batches = num > 1
        """Whether a step may have several batches; only then they are counted."""
        self.should_run_optimizer_step = True
        self.weight: Weight = 1
        self._num_whole = 0
        self._expected = num
        self._count = 0
        self._first: Weight = 0
        self._sum: Weight = 0
        self._is_even = True
        self._batch = 0
        self._backend: Backend | None = None
        self._data: DataLoaderCallback
        self._logging: Logging
        self._schedule: RunSchedule
        self._unit: Any = None
        self._counts_items: bool | None = None
        if not self.is_active:
            self.idle_hooks = frozenset({"on_before_optimizer_step", "on_train_batch_end"})

    @property
    def num_open(self) -> int:
        """The number of batches of the current step that are trained on already."""
        return self._num_whole

    def activate(self) -> None:
        """Accumulate even if `num` is 1, for micro-batches; the caller rebuilds the hooks."""
        self._reset()
        self.is_active = self.counts_batches = True
        self.idle_hooks = frozenset()

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.backend.comm.world_size > 1 and trainer.manual_steps is None:
            self._backend, self._data = trainer.backend, trainer.data
            self._logging, self._schedule = trainer.logging, trainer.schedule
            if not self.is_active:  # each batch is a window
                self.is_active = True
                self.idle_hooks = frozenset({"on_train_batch_end"})

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._counts_items = None
        stack.callback(self.drop, trainer)

    @override
    def on_enter_train(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        stack.callback(self.drop, trainer)  # a stop within a window: do not save it

    @override
    def on_step_discarded(self, trainer: Trainer) -> None:
        self.drop(trainer)

    @override
    def on_rollback(self, trainer: Trainer, ckpt_path: Path) -> None:
        self.drop(trainer)

    def drop(self, trainer: Trainer) -> None:
        """Drop an incomplete window and its gradients."""
        for optimizer in trainer.optimizers.values():
            trainer.backend.zero_grad(optimizer)
        self._reset()
        self.should_run_optimizer_step = True

    def _reset(self) -> None:
        self._count = self._num_whole = 0
        self._first = self._sum = 0
        self._is_even = True
        if self._backend is not None:
            self._backend.window.reset()

    def count(self, data: DataLoaderCallback) -> None:
        """Count the batch that has been loaded, and decide whether it ends its window."""
        if not self._count:
            self._expected = self.num * data.num_parts
        self._count += 1
        self._num_whole += data.ends_batch
        self.should_run_optimizer_step = self._num_whole >= self.num or data.is_last

    def scale(self, loss: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        """Scale the loss by the weight of this batch in its window.

        Cost: No host read.
        """
        weight = weight_of(outputs, batch)
        backend = self._backend
        if backend is None:
            return self._share_alone(loss, weight)
        data = self._data
        has_items = outputs.get("num_items") is not None
        if has_items is not self._counts_items:
            self._check_items(backend, has_items=has_items)
        self.weight = 0 if data.is_padding else weight
        if not self._count:  # each batch is a window
            if data.num_batches != self._batch:
                self._batch = data.num_batches
                self._reset()
            if data.is_even and self._is_even and not has_items:
                # All processes have equal weights.
                backend.window.add(1.0, loss if self._is_logged else None)
                return loss
        return self._share(backend, loss, outputs, self.weight)

    def _check_items(self, backend: Backend, *, has_items: bool) -> None:
        """Check that all processes weight batches alike. Collective in the first batch of a fit.

        Raises:
            ConfigError: If the output has no `num_items` here, but has them elsewhere, or had them.
        """
        if self._counts_items is None:
            self._counts_items = backend.comm.any_true(has_items)
        if has_items is not self._counts_items:
            what = "has" if has_items else "lacks"
            number = self._data.batch_idx - self._data.ends_batch
            raise ConfigError(
                f"With several processes, the model's output must have num_items in every training "
                f"batch or in none: it {what} num_items in batch {number} of epoch "
                f"{self._data.epoch + 1} on process {backend.comm.rank}, unlike in other batches."
            )

    def _share_alone(self, loss: Tensor, weight: Weight) -> Tensor:
        """Scale the loss for the window of a single process."""
        if isinstance(weight, Tensor):  # a quotient of integers would be float32
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

    def _share(self, backend: Backend, loss: Tensor, outputs: Outputs, weight: Weight) -> Tensor:
        """Scale the loss for the window of all processes."""
        ratio: Any
        if outputs.get("num_items") is not None:
            ratio = self._in_units(backend, weight) / self._expected
            ratio = ratio.to(torch.promote_types(loss.dtype, torch.float32))
            self._is_even = False
        elif self._data.is_even:
            if not self._first:
                self._first = weight
            ratio = weight / (self._first * self._expected)
            self._is_even = self._is_even and bool(weight == self._first)  # both from shapes
        else:
            self._first = self._first or 1
            ratio = weight / (self._first * self._expected)
            self._is_even = False
        is_whole = type(ratio) is float and ratio == 1  # reading a tensor would wait for the device
        backend.window.add(ratio, loss if self._is_logged else None)
        return loss if is_whole else loss * ratio

    @property
    def _is_logged(self) -> bool:
        # If the end of the run is unknown, any window may be the last one, which is logged.
        return self._logging.is_log_window or self._schedule.total_steps is None

    def _in_units(self, backend: Backend, weight: Weight) -> Tensor:
        """Return a weight in a common unit: a power of two, so that it is exact.

        The unit comes from the largest first batch. Collective, once.
        """
        dtype = torch.float64 if backend.caps.float64 else torch.float32
        if isinstance(weight, Tensor):
            counted = weight.to(dtype)
        else:  # avoids a copy from the host
            counted = torch.full((), weight, dtype=dtype, device=backend.device)
        if self._unit is None:
            own = counted.clamp_min(1).log2().floor().exp2()
            self._unit = backend.comm.reduce(own, "max")
        units: Tensor = counted / self._unit
        return units

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        is_full = not self._count or self._count == self._expected
        if not (self._is_even and is_full):
            if self._backend is None:
                factor = self._first * self._expected / _at_least_one(self._sum)
            else:
                factor = _inverse(self._backend.window.sums()[0])
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

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if not self._count:
            return
        if self._backend is not None:
            raise CheckpointError(
                "save_checkpoint was called between the batches of one step, when gradients "
                "differ between processes. Call it in on_step_boundary."
            )
        grads = {
            name: param.grad
            for name, param in trainer.model.named_parameters()
            if param.grad is not None
        }
        window = {
            "num_whole": self._num_whole,
            "expected": self._expected,
            "count": self._count,
            "first": self._first,
            "sum": self._sum,
            "is_even": self._is_even,
            "grads": grads,
        }
        state_dict["grad_accum"] = trainer.backend.state_view(window)

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if self._count:  # a window of other weights
            self.drop(trainer)
        window = state_dict.get("grad_accum")
        if window is None or not trainer.has_optimizer:
            return
        if self._backend is not None:
            raise CheckpointMismatch(
                "This checkpoint was saved by one process during gradient accumulation and cannot "
                "be resumed with several. Resume with one process, or load only the model with "
                "LoadCheckpointStates('model')."
            )
        if not self.is_active:
            log.warning(
                "The checkpoint was saved after %d of %d batches of a gradient accumulation, but "
                "this run does not accumulate gradients: those gradients are dropped.",
                window["count"],
                window["expected"],
            )
            return
        _restore_grads(trainer.model, window["grads"])
        device = trainer.backend.device
        weights = map_tensors(
            {"first": window["first"], "sum": window["sum"]}, lambda value: value.to(device)
        )
        self._first, self._sum = weights["first"], weights["sum"]
        self._num_whole, self._expected = window["num_whole"], window["expected"]
        self._count, self._is_even = window["count"], window["is_even"]
        self.should_run_optimizer_step = False


def _restore_grads(model: Module, grads: dict[str, Tensor]) -> None:
    """Restore the saved gradients of parameters.

    Raises:
        CheckpointMismatch: If one has no parameter of its shape; none is restored then.
    """
    params = dict(model.named_parameters())
    for name, grad in grads.items():
        if name not in params or params[name].shape != grad.shape:
            raise CheckpointMismatch(
                f"the checkpoint has a gradient of {name!r}, {tuple(grad.shape)}, but the model "
                f"has no such parameter. It was written within an optimizer step: use the "
                f"original model, or load it with LoadCheckpointStates('model')."
            )
    for name, grad in grads.items():
        param = params[name]
        param.grad = torch.empty_like(param, requires_grad=False).copy_(grad)


def weight_of(outputs: Outputs, batch: Batch) -> Weight:
    """Return the weight of a batch: `num_items` of the model's output, else its samples."""
    items = outputs.get("num_items")
    if items is None:
        return batch_size_of(batch)
    return items.detach() if isinstance(items, Tensor) else items


def _inverse(mean: Any) -> Any:
    """Return the factor of gradients; 0 if all weights are 0."""
    if isinstance(mean, Tensor):
        return torch.where(mean > 0, 1 / mean, torch.zeros_like(mean))
    return 1 / mean if mean else 0.0


def _at_least_one(weight: Weight) -> Weight:
    return weight.clamp_min(1) if isinstance(weight, Tensor) else max(weight, 1)
