"""Norms of parameters and gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Loader, Outputs

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")


class ComputeNorm(Callback):
    """Log 2-norms of the trainable parameters and of their gradients, on log steps.

    A layer consists of the parameters with `layers.<i>.` (or `h.<i>.`, `blocks.<i>.`) in their
    names.

    Metrics:
        model_wise_params_norm: 2-norm of all trainable parameters before the update.
        model_wise_grad_norm: 2-norm of all gradients before clipping.
        per_layer_grad_norm/layer_<i>: 2-norm of the gradients of a layer.

    Cost: On log steps, one norm for each parameter and each gradient.
    """

    log_step_hooks = frozenset({"on_before_optimizer_step", "on_train_batch_end"})

    def __init__(self) -> None:
        self._params: list[Tensor] = []
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
        self._params = [param for _, param in named]
        found = [_LAYER.search(name) for name, _ in named]
        self._layers = {idx: int(match[1]) for idx, match in enumerate(found) if match}

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        # One norm per tensor here; they are combined on the host.
        grads: list[Tensor] = []
        self._places = places = []
        for idx, param in enumerate(self._params):
            grad = param.grad
            if grad is not None:
                places.append(idx)
                grads.append(grad.coalesce().values() if grad.is_sparse else grad)
        self._norms = trainer.backend.norms.tensor_norms([*self._params, *grads])

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
