"""The gradient noise scale, estimated from per-example gradients."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from annotated_types import MinLen
from torch import Tensor, nn
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.base.constraints import checked
from modelzoo_trainer.base.devices import Exchange
from modelzoo_trainer.callback import Batch, Loader, Outputs, StateDict
from modelzoo_trainer.callbacks.compute_norm import ComputeNorm
from modelzoo_trainer.callbacks.flop_utilization import uncounted
from modelzoo_trainer.callbacks.parts.activation_hooks import ActivationHooks, named_modules
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.batches import batch_size_of
from modelzoo_trainer.zoo.callbacks.per_example_norms import (
    Use,
    computes_like,
    is_countable,
    squared_norms,
    trained_params,
    uses_of,
    wide,
)

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.compute_norm_gns")

Kind = Literal["Embedding", "LayerNorm", "Linear"]
Kinds = Annotated[list[Kind], MinLen(1), "a list of these"]


@dataclass(slots=True)
class _Uses:
    """Uses of a parameter in the current batch."""

    num_open: int = 0
    uses: list[Use] = field(default_factory=list)


class ComputeNormGNS(ComputeNorm):
    """Log the gradient noise scale, and what `ComputeNorm` logs, on log steps.

    The gradient of an example is its contribution to the step's gradient, times the number of
    examples N of the step, over all its batches and processes; their mean is the gradient of the
    step. Their squared norms are computed in the same backward pass, for the given kinds of layers.
    With P = their mean and G = the squared norm of the step's gradient, McCandlish et al. 2018 ("An
    Empirical Model of Large-Batch Training", appendix A.1, for batches of 1 and of N) give unbiased
    estimates of the squared norm of the true gradient, (N G - P) / (N - 1), and of the trace of the
    covariance, N (P - G) / (N - 1). Their quotient is the noise scale, roughly the batch size
    beyond which more examples help little. The value of a single step is noisy and may be negative:
    average both estimates over steps, then divide.

    Examples are the first dimension of the batch. Ignored, with a warning, are layers with an input
    whose first dimension is different, such as position embeddings; layers whose parameters are not
    plain ones; and layers in reentrant activation checkpoints. Shared parameters and layers that
    are called several times are counted correctly if only layers of the given kinds use them.
    Modules are not changed; a compiled model runs eagerly in the batches of log steps. A
    `ComputeNorm` beside this one logs its own metrics. A step that is resumed from the middle has
    no noise scale.

    Args:
        per_example_grad_norms: Kinds of layers: one or more of "Linear", "LayerNorm", "Embedding".

    Metrics:
        model_wise_params_norm: 2-norm of all trainable parameters before the update.
        model_wise_grad_norm: 2-norm of all gradients before clipping.
        per_layer_grad_norm/layer_<i>: 2-norm of the gradients of a layer.
        pegsqnorm/<name>: Mean squared 2-norm of the per-example gradients of a layer.
        gsqnorm/<name>: Squared 2-norm of the step's gradient of a layer.
        gradient_sqnorm: Estimated squared 2-norm of the true gradient of all these layers.
        gradient_noise_trace: Estimated trace of the covariance of the per-example gradients.
        gradient_noise_scale: gradient_noise_trace / gradient_sqnorm, in examples.

    Raises:
        ConfigError: If a kind is unknown; at setup, if the model has no such layer or an
            unsupported one, or the state is sharded.

    Cost: In the batches of log steps, a linear layer with I input features, O output features and T
        positions of each of B examples takes at most B T I O products, as many as the gradient of
        its weight, and fewer if T is small. Compiled models run eagerly there.
    """

    needs_one_optimizer = True

    @checked()
    def __init__(self, per_example_grad_norms: Kind | Kinds) -> None:
        super().__init__()
        given = per_example_grad_norms
        names = [given] if isinstance(given, str) else given
        self._kinds = tuple(getattr(nn, name) for name in names)
        self._hooks: ActivationHooks | None = None
        self._logs_norms = True
        self._entries: dict[int, _Uses] = {}
        self._ignored: set[str] = set()
        self._warned: set[str] = set()
        self._is_watching = False
        self._is_torn = False
        self._size = 0
        self._weight: Any = 0
        self._seed: Tensor | None = None
        self._exchange = Exchange()
        self._reset()

    def _reset(self) -> None:
        """Reset for a new step."""
        self._sums: dict[str, Tensor] = {}
        self._owned: dict[int, tuple[str, Tensor]] = {}
        self._spoiled: set[str] = set()
        self._unseen: dict[str, list[Tensor]] = {}
        self._num = 0
        self._total: Any = 0

    # ---- setup and fit

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.backend.caps.sharded_state:
            raise ConfigError(
                "ComputeNormGNS does not work with sharded parameters (backend.parallel.shard or "
                "tensor). Set backend.parallel to {replicate: -1}, or remove the callback."
            )
        comm = trainer.backend.comm
        if comm.world_size != comm.data_shard[1]:
            raise ConfigError(
                "ComputeNormGNS does not work with split rows (backend.parallel.context): no "
                "process has the gradient of a whole example. Remove context, or the callback."
            )
        layers = [(name, layer) for name, layer in named_modules(trainer.model) if self._is(layer)]
        if not layers:
            raise ConfigError(
                f"ComputeNormGNS.per_example_grad_norms: {type(trainer.model).__name__} has no "
                f"layer of type {' or '.join(kind.__name__ for kind in self._kinds)}."
            )
        for name, layer in layers:
            if isinstance(layer, nn.Embedding) and layer.scale_grad_by_freq:
                raise ConfigError(
                    f"ComputeNormGNS does not support the Embedding {name!r}: with "
                    f"scale_grad_by_freq=True, the gradient of an example depends on the others. "
                    f"Set scale_grad_by_freq=False, or remove 'Embedding' from "
                    f"per_example_grad_norms."
                )

    def _is(self, layer: Module) -> bool:
        """Return whether a layer computes the same as one of the given kinds."""
        return any(computes_like(layer, kind) for kind in self._kinds)

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        others = trainer.get_callbacks(ComputeNorm)
        self._logs_norms = others[0] is self and all(
            isinstance(other, ComputeNormGNS) for other in others
        )
        self._hooks = hooks = ActivationHooks(trainer.model, self._see)
        stack.callback(self._leave)
        stack.callback(hooks.end)

    def _leave(self) -> None:
        self._hooks = None
        self._entries = {}
        self._seed = None
        self._is_watching = self._is_torn = False
        self._reset()

    @override
    def on_train_start(
        self,
        trainer: Trainer,
        model: Module,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        super().on_train_start(trainer, model, train_dataloader, loop, loop_idx)
        self._reset()

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        self._is_torn = "grad_accum" in state_dict
        self._reset()

    # ---- forward

    @override
    def on_before_forward(
        self,
        trainer: Trainer,
        model: Module,
        batch: Batch,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self._is_watching = False
        if self._hooks is None or trainer.val_iterator is not None:
            return
        # Without a known end of the run, any step may be the last one, which is logged.
        is_wanted = trainer.logging.is_log_window or trainer.schedule.total_steps is None
        if is_wanted or trainer.rehearses:
            self._is_watching = True
            self._entries, self._seed = {}, None
            self._size = batch_size_of(batch)
            self._hooks.begin()

    @override
    def on_after_forward(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        if self._is_watching and self._hooks is not None:
            self._hooks.end()
            self._weight = trainer.weight_of(outputs, batch)

    def _see(
        self, name: str, layer: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not self._is(layer):
            return
        params = list(trained_params(layer).values())
        if not output.requires_grad:
            self._unseen[name] = params
            return
        given = args[0] if args else kwargs["input"]
        is_counted = given.shape[:1] == (self._size,) and is_countable(layer, given)
        if not is_counted:
            self._ignored.add(name)
        for param in params:
            owner, _ = self._owned.setdefault(id(param), (name, param))
            if is_counted:
                self._entries.setdefault(id(param), _Uses()).num_open += 1
            else:  # the other calls are not the complete gradient
                self._spoiled.add(owner)
        if is_counted and params:
            output.register_hook(partial(self._see_grad, layer, given.detach()))

    # ---- backward

    @override
    def on_before_backward(self, trainer: Trainer, model: Module, outputs: Outputs) -> None:
        loss = outputs.get("loss")
        if self._is_watching and isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(self._see_seed)  # type: ignore[no-untyped-call]  # untyped in torch

    def _see_seed(self, grad: Tensor) -> None:
        """Record the factor of the loss: its weight in the step, times the loss scale."""
        self._seed = grad.detach().reshape(())

    def _see_grad(self, layer: Module, given: Tensor, grad: Tensor) -> None:
        uses = uses_of(layer, given, grad.detach())
        for role, param in trained_params(layer).items():
            entry = self._entries[id(param)]
            entry.uses.append(uses[role])
            entry.num_open -= 1
            if not entry.num_open:
                self._add(id(param), entry)

    def _add(self, key: int, entry: _Uses) -> None:
        uses, entry.uses = entry.uses, []
        if not uses or self._seed is None:
            return
        seed = wide(self._seed)
        # The loss of a batch with weight 0 is multiplied by 0.
        factor = torch.where(seed == 0, torch.zeros_like(seed), self._weight / seed)
        with uncounted():
            square = squared_norms(uses).sum() * factor.square()
        layer, _ = self._owned[key]
        known = self._sums.get(layer)
        self._sums[layer] = square if known is None else known + square

    @override
    def on_after_backward(self, trainer: Trainer, model: Module, outputs: Outputs) -> None:
        if not self._is_watching:
            return
        for key, entry in self._entries.items():  # calls that the loss does not depend on
            self._add(key, entry)
        self._num += 0 if trainer.is_padding else self._size
        self._total = self._total + self._weight

    # ---- the step

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        if self._logs_norms:
            super().on_before_optimizer_step(trainer, model, optimizer)
        for name, params in self._unseen.items():
            if name not in self._sums and any(param.grad is not None for param in params):
                self._ignored.add(name)
        if self._is_watching and not self._is_torn:
            names = self._complete_layers(trainer)
            if names:
                trainer.log_metrics_dict(self._metrics(trainer, names))

    @override
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        self._is_torn = False
        self._entries = {}
        self._reset()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, model, outputs, batch, batch_idx)
        for name in sorted(self._ignored - self._warned):
            log.warning(
                "ComputeNormGNS ignores the layer %r for one of these reasons: the first dimension "
                "of its input is not the batch size, its weight is not a parameter (as with "
                "weight_norm), or the layer is in torch.utils.checkpoint with use_reentrant=True.",
                name,
            )
        self._warned |= self._ignored

    def _complete_layers(self, trainer: Trainer) -> list[str]:
        """Return the layers with complete gradients of their examples. Collective.

        Processes may call other layers; one that is ignored on a process is ignored on all.
        """
        own = [sorted(self._sums), sorted(self._spoiled)]
        found = [own]
        if trainer.backend.comm.world_size > 1:
            found = self._exchange.gather(trainer.backend.comm, own)
        spoiled = {name for _, names in found for name in names}
        names = sorted({name for names, _ in found for name in names} - spoiled)
        if any(name not in self._sums for name in names):
            for name, layer in named_modules(trainer.model):
                if name in names and name not in self._sums:
                    self._add_unused(name, layer)
        return names

    def _add_unused(self, name: str, layer: Module) -> None:
        """Add a layer that only other processes have called."""
        for param in trained_params(layer).values():
            self._owned.setdefault(id(param), (name, param))
            self._sums[name] = wide(param.new_zeros(()))

    def _metrics(self, trainer: Trainer, names: list[str]) -> dict[str, Tensor]:
        squares = torch.stack([self._sums[name] for name in names])
        num, total = torch.full_like(squares[0], self._num), squares.new_zeros(()) + self._total
        if trainer.backend.comm.world_size > 1:
            gathered = trainer.backend.comm.reduce(torch.cat([squares, torch.stack([num, total])]))
            squares, num, total = gathered[:-2], gathered[-2], gathered[-1]
        examples = squares * num / total.square()
        whole = torch.stack([self._square_of(name) for name in names]).to(examples)
        metrics = {f"pegsqnorm/{name}": value for name, value in zip(names, examples, strict=True)}
        metrics |= {f"gsqnorm/{name}": value for name, value in zip(names, whole, strict=True)}
        if trainer.backend.comm.world_size == 1 and self._num == 1:
            return metrics  # a single example has no variance
        small, big = examples.sum(), whole.sum()
        metrics["gradient_sqnorm"] = sqnorm = (num * big - small) / (num - 1)
        metrics["gradient_noise_trace"] = trace = num * (small - big) / (num - 1)
        metrics["gradient_noise_scale"] = trace / sqnorm
        return metrics

    def _square_of(self, layer: str) -> Tensor:
        """Return the squared norm of the step's gradient of the parameters of a layer."""
        grads = [
            param.grad
            for owner, param in self._owned.values()
            if owner == layer and param.grad is not None
        ]
        dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        return torch.stack([wide(grad).square().sum() for grad in dense]).sum()
