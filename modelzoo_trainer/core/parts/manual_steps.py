"""Several optimizers, stepped by a user's `training_step`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from modelzoo_trainer.base.devices import Exchange
from modelzoo_trainer.callback import Batch, Outputs
from modelzoo_trainer.core.model import to_outputs
from modelzoo_trainer.core.precision import parameters_of
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.loading.batches import batch_size_of

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_HOME: Final = "modelzoo_trainer.trainer"  # of the default training_step


class ManualSteps:
    """Run a user's `training_step`, and the backward passes and optimizer steps in it.

    It runs in autocast, except for backward passes and optimizer steps. Gradients are cleared after
    it, and the loss scale is updated once. With several processes each optimizer steps with the
    mean gradient of all samples.

    `optimizers`: by name.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        self._with_gradient = {name: Exchange() for name in optimizers}
        self.schedulers: dict[str, list[Any]] = {name: [] for name in optimizers}
        """The schedulers of each optimizer, stepped after it. Set by SchedulersCallback."""
        self._batch: Batch = None
        self._weight = 0
        self._autocast: AbstractContextManager[Any] | None = None
        self._is_running = False
        self._start()

    def _start(self) -> None:
        self._num_steps = dict.fromkeys(self.optimizers, 0)
        self._num_backward = 0
        self._others: Tensor | None = None

    # ---- optimizers by name

    def named(self, name: str) -> Optimizer:
        """Return an optimizer.

        Raises:
            ConfigError: If the name is unknown.
        """
        if name not in self.optimizers:
            raise ConfigError(f"there is no optimizer {name!r}. {suggest(name, self.optimizers)}")
        return self.optimizers[name]

    def first_step_of(self, optimizer: Optimizer) -> str | None:
        """Return an optimizer's name; None if it has already stepped in this batch."""
        name = next(name for name, own in self.optimizers.items() if own is optimizer)
        return None if self._num_steps[name] else name

    # ---- the step

    def run(self, trainer: Trainer, batch: Batch) -> Outputs:
        """Run the user's `training_step` on one batch, between the hooks of a step.

        Raises:
            ConfigError: If it returns no loss, or leaves gradients that no optimizer used.
        """
        self._start()
        self._batch = batch
        self._weight = 0 if trainer.is_padding else batch_size_of(batch)
        with trainer.backend.step(trainer.data.num_batches):
            trainer.hooks.on_train_step_start(trainer, trainer.model, batch)
            with self._running(trainer):
                returned = trainer.training_step(batch)
            outputs = dict(_checked(trainer, returned))
            outputs["loss"] = self._with_others(outputs["loss"])
            self._finish(trainer)
            trainer.hooks.on_train_step_end(trainer, trainer.model, outputs, batch)
        return outputs

    @contextmanager
    def _running(self, trainer: Trainer) -> Iterator[None]:
        autocast = trainer.precision.autocast
        self._is_running = True
        try:
            if autocast is None:
                yield
                return
            self._autocast = copy.copy(autocast)  # `forward` enters the original
            with self._autocast:
                yield
        finally:
            self._autocast = self._batch = None
            self._is_running = False

    @contextmanager
    def _outside_autocast(self) -> Iterator[None]:
        """Leave autocast, and enter it again, which clears its cache."""
        autocast, self._autocast = self._autocast, None
        if autocast is None:
            yield
            return
        autocast.__exit__(None, None, None)
        try:
            yield
        finally:
            autocast.__enter__()
            self._autocast = autocast

    def _finish(self, trainer: Trainer) -> None:
        if self._num_backward and not any(self._num_steps.values()):
            raise ConfigError(
                f"{type(trainer).__name__}.training_step called manual_backward, but not "
                f"self.optimizer_step(name). Call both for every batch: gradients are cleared "
                f"after each batch, so they cannot be accumulated over several."
            )
        trainer.precision.update_scale()
        for optimizer in self.optimizers.values():
            trainer.backend.zero_grad(optimizer)

    # ---- within training_step

    def backward(self, trainer: Trainer, loss: Tensor) -> None:
        """Compute the gradients of a loss, with the hooks of a backward pass."""
        self._require_running("manual_backward")
        self._num_backward += 1
        with self._outside_autocast():
            trainer.backward({"loss": loss}, self._batch)
        zero = loss.detach().reshape(()) * 0  # NaN if the loss is not finite
        self._others = zero if self._others is None else self._others + zero

    def _with_others(self, loss: Tensor) -> Tensor:
        """Return a loss; NaN if any loss of this step is non-finite, since one is checked."""
        return loss if self._others is None else loss.detach() + self._others

    def step(self, trainer: Trainer, name: str) -> None:
        """Step one optimizer, then its schedulers. Collective."""
        self._require_running("optimizer_step")
        optimizer, model, hooks = self.named(name), trainer.model, trainer.hooks
        with self._outside_autocast():
            if trainer.backend.comm.world_size > 1:
                self._average(trainer, name)
            hooks.on_before_optimizer_step(trainer, model, optimizer)
            trainer.precision.optimizer_step(optimizer)
            hooks.on_after_optimizer_step(trainer, model, optimizer)
            self._num_steps[name] += 1
            for scheduler in self.schedulers[name]:
                hooks.on_before_scheduler_step(trainer, model, optimizer, scheduler)
                scheduler.step()
                hooks.on_after_scheduler_step(trainer, model, optimizer, scheduler)

    def _require_running(self, method: str) -> None:
        if not self._is_running:
            raise ConfigError(f"{method} was called outside of training_step.")

    def _average(self, trainer: Trainer, name: str) -> None:
        """Average each gradient over the samples of all processes. Collective.

        A parameter that has a gradient on some processes only has a zero one on the others.
        """
        params = list(parameters_of(self.named(name)))
        own = [number for number, param in enumerate(params) if param.grad is not None]
        found = self._with_gradient[name].gather(trainer.backend.comm, own)
        grads: list[Tensor] = []
        for param in (params[number] for number in sorted(set().union(*found))):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            grads.append(param.grad)
        if not grads:
            return
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        flat = torch.cat([grad.reshape(-1).to(wide) for grad in grads] + [grads[0].new_ones(1)])
        sums = trainer.backend.comm.reduce(flat * self._weight)
        means = sums[:-1] / sums[-1].clamp_min(1)
        places = torch.split(means, [grad.numel() for grad in grads])
        for grad, mean in zip(grads, places, strict=True):
            grad.copy_(mean.reshape(grad.shape))

    def mean_loss(self, trainer: Trainer, loss: Tensor) -> Tensor:
        """Average the loss of the batch over the samples of all processes. Collective."""
        comm = trainer.backend.comm
        value = loss.detach().reshape(())
        if comm.world_size == 1:
            return value
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        pair = torch.stack((value * self._weight, torch.full_like(value, self._weight)))
        total, weight = comm.reduce(pair).unbind()
        return total / weight.clamp_min(1)


def _checked(trainer: Trainer, returned: Any) -> Outputs:
    """Return the output of a `training_step` as a mapping with a loss."""
    outputs = {} if returned is None else to_outputs(returned)
    loss = outputs.get("loss")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError(
            f"{type(trainer).__name__}.training_step returned no loss with one element (it "
            f"returned: {_described(returned)}). Return the loss tensor, or a dict with the loss "
            f"as 'loss'."
        )
    return outputs


def _described(returned: Any) -> str:
    """Return the type of what a `training_step` returned, and its shape or items."""
    kind = type(returned).__name__
    if isinstance(returned, Tensor):
        return f"{kind} of shape {tuple(returned.shape)}"
    if isinstance(returned, Mapping):
        items = [
            f"{key!r}: {_described(value) if key == 'loss' else type(value).__name__}"
            for key, value in returned.items()
        ]
        return f"{kind} with {', '.join(items)}" if items else f"empty {kind}"
    return "None" if returned is None else kind


def metric_suffix(trainer: Trainer, optimizer: Optimizer) -> str | None:
    """Return the suffix of the metrics of one of several optimizers, "/<name>".

    None if it has already stepped in this batch.
    """
    assert trainer.manual_steps is not None  # there are several
    name = trainer.manual_steps.first_step_of(optimizer)
    return None if name is None else f"/{name}"


def overrides_training_step(trainer: Trainer) -> bool:
    """Return whether a trainer's class overrides `training_step`."""
    return getattr(type(trainer).training_step, "__module__", "") != _HOME


def check_manual(trainer: Trainer, loop: Any) -> None:
    """Check that the settings work with several optimizers.

    Raises:
        ConfigError: If one does not.
    """
    names, size = ", ".join(trainer.optimizers), trainer.data.micro_batch_size
    if not overrides_training_step(trainer):
        raise ConfigError(
            f"A Trainer with several optimizers ({names}) needs a custom training_step, but "
            f"{type(trainer).__name__} has none. Subclass Trainer and override "
            f"training_step(self, batch): compute a loss, then call self.manual_backward(loss) "
            f"and self.optimizer_step(name)."
        )
    for why, fails in (
        (f"grad_accum_steps is {loop.grad_accum_steps}; use 1", loop.grad_accum_steps > 1),
        (f"micro_batch_size is {size}; use None (null)", size is not None),
        ("sparsity is given; remove it", bool(trainer.callbacks["sparsity"].params)),
        (
            "backend.parallel shards the model over processes; set only backend.parallel.replicate",
            trainer.backend.caps.sharded_state,
        ),
    ):
        if fails:
            raise ConfigError(f"Not supported with several optimizers ({names}): {why}.")
    for callback in trainer.all_callbacks:
        if getattr(callback, "needs_one_optimizer", False):
            raise ConfigError(
                f"{type(callback).__name__} requires one optimizer, but the trainer has several "
                f"({names}). Remove it."
            )
