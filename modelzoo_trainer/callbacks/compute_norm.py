"""Norms of the parameters and of their gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Loader, Outputs

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")


class ComputeNorm(Callback):
    """Logs 2-norms of the trainable parameters and of their gradients, on log steps.

    `model_wise_params_norm` is that before the update, `model_wise_grad_norm` that of the
    gradients before clipping, and `per_layer_grad_norm/layer_<i>` that of the gradients of the
    parameters with `layers.<i>.` (or `h.<i>.`, `blocks.<i>.`) in their names.

    Metrics:
        model_wise_params_norm: 2-norm of all trainable parameters before the update.
        model_wise_grad_norm: 2-norm of all gradients before clipping.
        per_layer_grad_norm/layer_<i>: 2-norm of the gradients of a layer.

    Cost: On log steps, one norm for each parameter and each gradient.
    """

    log_step_hooks = frozenset({"on_before_optimizer_step", "on_train_batch_end"})

    def __init__(self) -> None:
        self._params: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._is_plain = True
        self._layers: dict[int, int] = {}
        self._norms: Sequence[Tensor] = ()
        self._places: list[int] = []

    @override
    def on_train_start(
        self,
        trainer: Trainer,
        model: Module,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        # Detached: they share the memory, and their norms need no graph.
        self._params = [param.detach() for _, param in named]
        self._sources = [param for _, param in named]
        self._is_plain = all(param.dtype is torch.float32 for param in self._params)
        found = [_LAYER.search(name) for name, _ in named]
        self._layers = {idx: int(match[1]) for idx, match in enumerate(found) if match}

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        # One norm a tensor here; they are put together when they are on the host.
        grads: list[Tensor] = []
        self._places = places = []
        for idx, param in enumerate(self._sources):
            grad = param.grad
            if grad is not None:
                places.append(idx)
                grads.append(grad.coalesce().values() if grad.is_sparse else grad)
        if trainer.backend.caps.sharded_state:
            self._norms = trainer.backend.norms.tensor_norms([*self._sources, *grads])
            return
        tensors = self._params + grads
        self._norms = torch._foreach_norm(tensors) if self._is_plain else norms_of(tensors)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        norms, self._norms = self._norms, ()
        if norms and trainer.backend.reads_at_once:
            self._log(trainer, self._places, [norm.item() for norm in norms])
        elif norms:
            trainer.read(norms, partial(self._log, trainer, self._places))

    def _log(self, trainer: Trainer, places: list[int], norms: list[float]) -> None:
        num = len(norms) - len(places)
        metrics = {"model_wise_params_norm": math.hypot(*norms[:num])}
        if places:
            metrics["model_wise_grad_norm"] = math.hypot(*norms[num:])
        if self._layers:
            metrics.update(self._by_layer(places, norms[num:]))
        trainer.log_metrics_dict(metrics)

    def _by_layer(self, places: list[int], norms: list[float]) -> dict[str, float]:
        parts: dict[int, list[float]] = {}
        for idx, norm in zip(places, norms, strict=True):
            if idx in self._layers:
                parts.setdefault(self._layers[idx], []).append(norm)
        return {f"per_layer_grad_norm/layer_{n}": math.hypot(*parts[n]) for n in sorted(parts)}


def norms_of(tensors: list[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor: in float32, or in double if it is double itself.

    `tensors`: none of them requires a gradient.
    """
    if all(tensor.dtype is torch.float32 for tensor in tensors):
        return list(torch._foreach_norm(tensors))
    return [
        torch.linalg.vector_norm((t.abs() if t.is_complex() else t).to(_wide(t))) for t in tensors
    ]


def _wide(tensor: Tensor) -> torch.dtype:
    is_double = tensor.dtype in (torch.float64, torch.complex128)
    return torch.float64 if is_double else torch.float32
