"""Norms of the parameters and of their gradients."""

from __future__ import annotations

import math
import re
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
    """

    log_step_hooks = frozenset({"on_before_optimizer_step", "on_train_batch_end"})

    def __init__(self) -> None:
        self._params: list[Tensor] = []
        self._layers: list[int | None] = []
        self._norms: list[Tensor] = []
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
        self._params = [param for _, param in named]
        found = [_LAYER.search(name) for name, _ in named]
        self._layers = [None if match is None else int(match[1]) for match in found]

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        # One norm a tensor here; they are put together when they are on the host.
        grads = [param.grad for param in self._params]
        self._places = [idx for idx, grad in enumerate(grads) if grad is not None]
        dense = [grad if not grad.is_sparse else _dense(grad) for grad in grads if grad is not None]
        self._norms = norms_of(self._params + dense)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        norms, self._norms = self._norms, []
        if norms:
            trainer.read(norms, partial(self._log, trainer, self._places))

    def _log(self, trainer: Trainer, places: list[int], norms: list[float]) -> None:
        num = len(norms) - len(places)
        metrics = {"model_wise_params_norm": math.hypot(*norms[:num])}
        if places:
            metrics["model_wise_grad_norm"] = math.hypot(*norms[num:])
        by_layer: dict[int, list[float]] = {}
        for idx, norm in zip(places, norms[num:], strict=True):
            layer = self._layers[idx]
            if layer is not None:
                by_layer.setdefault(layer, []).append(norm)
        for layer, parts in by_layer.items():
            metrics[f"per_layer_grad_norm/layer_{layer}"] = math.hypot(*parts)
        trainer.log_metrics_dict(metrics)


def norms_of(tensors: list[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor, all in one type: float32, or double if one of them is."""
    dtypes = {tensor.dtype for tensor in tensors}
    with torch.no_grad():
        if dtypes == {torch.float32}:
            return list(torch._foreach_norm(tensors))
        double = not dtypes.isdisjoint((torch.float64, torch.complex128))
        dtype = torch.float64 if double else torch.float32
        if any(tensor.is_complex() for tensor in tensors):
            return [torch.linalg.vector_norm(torch.abs(tensor), dtype=dtype) for tensor in tensors]
        return list(torch._foreach_norm(tensors, 2, dtype))


def _dense(grad: Tensor) -> Tensor:
    return grad.coalesce().values()
