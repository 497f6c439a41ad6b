"""Validation metrics that the model itself computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Loader, Outputs
from modelzoo_trainer.core.loss_accum import Mean, take_all

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_NOT_METRICS: Final = ("loss", "num_items")


class ModelEvalMetrics(Callback):
    """Log, at the end of each validation, the metrics in the model's output besides the loss.

    Every scalar tensor in the model's output is averaged over the batches of all processes, with
    the weights of the loss: samples, or `num_items` if the output has it. Every submodule with the
    methods `compute` and `reset`, such as those of torchmetrics, is reset at the beginning of a
    validation, computed at its end and logged under its name. Nothing is logged for a validation
    that was interrupted.

    A model may define `validation_means(outputs, batch)`, which returns `{name: (value, weight,
    function)}` for metrics with a weight of their own: the mean of the scalar tensors `value` over
    all batches and processes is logged, or `function` of that mean unless it is None.

    Metrics:
        validate_<n>/<name>: The metric that the model calls so, for the n-th dataloader.

    Cost: In validation, one addition per scalar in the output.
    """

    def __init__(self) -> None:
        self._means: dict[str, Mean] = {}
        self._functions: dict[str, Callable[[Tensor], Tensor] | None] = {}

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        self._drop()
        stack.callback(self._drop)

    def _drop(self) -> None:
        self._means, self._functions = {}, {}

    @override
    def on_validate_start(
        self, trainer: Trainer, model: Module, val_dataloader: Loader, loop: Any
    ) -> None:
        for _, metric in metric_modules(model):
            metric.reset()

    @override
    def on_validate_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        own = getattr(trainer.model, "validation_means", None)
        found = {} if own is None else own(outputs, batch)
        for name, (value, weight, function) in found.items():
            self._add(trainer, name, value, 0 if trainer.is_padding else weight)
            self._functions[name] = function
        common: Any = None
        for name, value in outputs.items():
            is_scalar = isinstance(value, Tensor) and not value.dim()
            if name in found or name in _NOT_METRICS or not is_scalar:
                continue
            if common is None:
                common = trainer.weight_of(outputs, batch)
            self._add(trainer, name, value, common)

    def _add(self, trainer: Trainer, name: str, value: Tensor, weight: Any) -> None:
        if name not in self._means:
            self._means[name] = Mean(double=trainer.backend.caps.float64)
        self._means[name].add(value, weight)

    @override
    def on_validate_end(self, trainer: Trainer, model: Module, loop: Any) -> None:
        if trainer.val_is_complete:
            means = take_all(self._means, trainer.backend)
            trainer.log_metrics_dict(
                {name: self._finished(name, mean) for name, mean in means.items()}
            )
        for name, metric in metric_modules(model):
            if trainer.val_is_complete:
                trainer.log_metrics_dict(_named(name, metric.compute()))
            metric.reset()

    def _finished(self, name: str, mean: Tensor | None) -> Tensor | None:
        function = self._functions.get(name)
        return mean if function is None or mean is None else function(mean)


def metric_modules(model: Module) -> Iterator[tuple[str, Any]]:
    """Yield the submodules that compute a metric, with their names."""
    for name, module in model.named_modules():
        if module is model:
            continue
        methods = (getattr(module, "compute", None), getattr(module, "reset", None))
        if all(map(callable, methods)):
            yield name, module


def _named(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {f"{name}/{key}": inner for key, inner in value.items()}
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.reshape(())
    return {name: value.detach() if isinstance(value, Tensor) else value}
