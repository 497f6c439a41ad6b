"""Validation metrics that the model itself computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Loader, Outputs
from modelzoo_trainer.core.loss_accum import NamedMeans

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_NOT_METRICS: Final = ("loss", "num_items")


class ModelEvalMetrics(Callback):
    """Log, at the end of each validation, the metrics in the model's output besides the loss.

    Every scalar tensor in the model's output is averaged over the batches of all processes, with
    the weights of the loss: samples, or `num_items` if the output has it. Every submodule with the
    methods `compute` and `reset`, such as a torchmetrics metric, is reset at the beginning of a
    validation, computed at its end and logged under its name; padding batches do not change it.
    Nothing is logged for a validation that was interrupted.

    Batches and processes may have different metrics, such as one per class: each is averaged over
    the batches that have it.

    A model may define `validation_means(outputs, batch)`, which returns `{name: (value, weight,
    function)}` for metrics with a weight of their own: the mean of the scalar tensors `value` over
    all batches and processes is logged, or `function` of that mean unless it is None.

    Metrics:
        validate_<n>/<name>: The metric that the model calls so, for the n-th dataloader.

    Cost: In validation, one addition per scalar in the output.
    """

    def __init__(self) -> None:
        self._means = NamedMeans()
        self._before_padding: list[tuple[Module, dict[str, Any]]] = []

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        self._means.drop()
        stack.callback(self._means.drop)

    @override
    def on_validate_start(
        self, trainer: Trainer, model: Module, val_dataloader: Loader, loop: Any
    ) -> None:
        for _, metric in metric_modules(model):
            metric.reset()

    @override
    def on_validate_step_start(self, trainer: Trainer, model: Module, batch: Batch) -> None:
        if trainer.is_padding:  # its forward pass updates them
            self._before_padding = [
                (part, _state_of(part))
                for _, metric in metric_modules(model)
                for part in metric.modules()
            ]

    @override
    def on_validate_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        for part, state in self._before_padding:
            part._buffers.update(state.pop("_buffers"))  # others keep this dictionary
            vars(part).update(state)
        self._before_padding = []
        own = getattr(trainer.model, "validation_means", None)
        found = {} if own is None else own(outputs, batch)
        for name, (value, weight, function) in found.items():
            counted = 0 if trainer.is_padding else weight
            self._means.add(trainer.backend, name, value, counted, function)
        common: Any = None
        for name, value in outputs.items():
            is_scalar = isinstance(value, Tensor) and not value.dim()
            if name in found or name in _NOT_METRICS or not is_scalar:
                continue
            if common is None:
                common = trainer.weight_of(outputs, batch)
            self._means.add(trainer.backend, name, value, common)

    @override
    def on_validate_end(self, trainer: Trainer, model: Module, loop: Any) -> None:
        if trainer.val_is_complete:
            trainer.log_metrics_dict(self._means.take(trainer.backend))
        for name, metric in metric_modules(model):
            if trainer.val_is_complete:
                trainer.log_metrics_dict(_named(name, metric.compute()))
            metric.reset()


def metric_modules(model: Module) -> Iterator[tuple[str, Any]]:
    """Yield the submodules that compute a metric, with their names."""
    for name, module in model.named_modules():
        if module is model:
            continue
        methods = (getattr(module, "compute", None), getattr(module, "reset", None))
        if all(map(callable, methods)):
            yield name, module


def _state_of(module: Module) -> dict[str, Any]:
    """Return copies of a module's attributes, except its parameters and submodules."""
    return {
        name: _copied(value)
        for name, value in vars(module).items()
        if name not in ("_parameters", "_modules")
    }


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is list:
        return [_copied(inner) for inner in value]
    if type(value) is dict:
        return {key: _copied(inner) for key, inner in value.items()}
    return value


def _named(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {f"{name}/{key}": inner for key, inner in value.items()}
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.reshape(())
    return {name: value.detach() if isinstance(value, Tensor) else value}
