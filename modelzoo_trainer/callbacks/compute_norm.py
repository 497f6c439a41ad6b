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
from modelzoo_trainer.core.parts.manual_steps import metric_suffix
from modelzoo_trainer.core.parts.structure import ModelStructure
from modelzoo_trainer.core.precision import parameters_of

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_Found = tuple[list[int], Sequence[Tensor]]  # places of gradients; norms of parameters, gradients
_LAYER: Final = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")


class ComputeNorm(Callback):
    """Log 2-norms of the trainable parameters and of their gradients, on log steps.

    A layer consists of the parameters with `layers.<i>.` (or `h.<i>.`, `blocks.<i>.`) in their
    names.
    With several optimizers each has norms of its own parameters, at its first step in a
    batch, and `/<name>` is appended to the names.

    Metrics:
        model_wise_params_norm: 2-norm of all trainable parameters before the update.
        model_wise_grad_norm: 2-norm of all gradients before clipping.
        per_layer_grad_norm/layer_<i>: 2-norm of the gradients of a layer.

    Cost: On log steps, one norm for each parameter and each gradient.
    """

    log_step_hooks = frozenset({"on_before_optimizer_step", "on_train_batch_end"})

    def __init__(self) -> None:
        self._structure: ModelStructure | None = None
        self._params: list[Tensor] = []
        self._layers: dict[int, int] = {}
        self._all_places: list[int] = []
        self._found: dict[str, _Found] = {}
        """By the suffix of the names."""

    @override
    def on_train_start(
        self,
        trainer: Trainer,
        model: Module,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        self._found = {}
        self._find(model)

    def _find(self, model: Module) -> None:
        """Look up the trainable parameters."""
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        self._params = [param for _, param in named]
        self._all_places = list(range(len(named)))
        found = [_LAYER.search(name) for name, _ in named]
        self._layers = {idx: int(match[1]) for idx, match in enumerate(found) if match}
        self._structure = ModelStructure(model)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        # One norm per tensor here; they are combined on the host.
        suffix = "" if trainer.manual_steps is None else metric_suffix(trainer, optimizer)
        if suffix is None:
            return
        if self._structure is None or not self._structure.is_current():
            self._find(model)
        params, places = self._params, self._all_places
        if suffix:
            places = self._places_of(optimizer)
            params = [self._params[idx] for idx in places]
        grads: list[Tensor] = []
        found: list[int] = []
        for idx, param in zip(places, params, strict=True):
            grad = param.grad
            if grad is not None:
                found.append(idx)
                grads.append(grad.coalesce().values() if grad.is_sparse else grad)
        norms = trainer.backend.norms.tensor_norms([*params, *grads])
        self._found[suffix] = found, norms

    def _places_of(self, optimizer: Optimizer) -> list[int]:
        own = {id(param) for param in parameters_of(optimizer)}
        return [idx for idx in self._all_places if id(self._params[idx]) in own]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        found, self._found = self._found, {}
        for suffix, (places, norms) in found.items():
            if not norms:
                continue
            if trainer.backend.reads_at_once:
                self._log(trainer, suffix, places, [norm.item() for norm in norms])
            else:
                trainer.read(norms, partial(self._log, trainer, suffix, places))

    def _log(self, trainer: Trainer, suffix: str, places: list[int], norms: list[float]) -> None:
        num = len(norms) - len(places)
        metrics = {"model_wise_params_norm": math.hypot(*norms[:num])}
        if places:
            metrics["model_wise_grad_norm"] = math.hypot(*norms[num:])
        if self._layers:
            metrics.update(self._by_layer(places, norms[num:]))
        if suffix:
            metrics = {f"{name}{suffix}": value for name, value in metrics.items()}
        trainer.log_metrics_dict(metrics)

    def _by_layer(self, places: list[int], norms: list[float]) -> dict[str, float]:
        parts: dict[int, list[float]] = {}
        for idx, norm in zip(places, norms, strict=True):
            if idx in self._layers:
                parts.setdefault(self._layers[idx], []).append(norm)
        return {f"per_layer_grad_norm/layer_{n}": math.hypot(*parts[n]) for n in sorted(parts)}
