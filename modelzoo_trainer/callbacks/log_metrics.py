"""Metrics of batches, parameter groups and sparsity; the latest metrics of each epoch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from numbers import Number, Real
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Loader, Metrics
from modelzoo_trainer.callbacks.parts.activation_hooks import named_tensors
from modelzoo_trainer.core.parts.closures import is_recorded, snapshot
from modelzoo_trainer.core.parts.manual_steps import metric_suffix
from modelzoo_trainer.core.sparsity import Sparsity
from modelzoo_trainer.errors import ConfigError, suggest

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.metrics")


_KEPT: Final = (int, float, str, Tensor)


class LogMetrics(Callback):
    """Log the latest value of each metric at the end of epochs, train stages and validations.

    Training metrics are logged when an epoch or a train stage ends, validation metrics when the
    validation is complete; what counts is when a metric was logged, not its name. Each value is
    logged once. Metrics that later callbacks log at the same point are included, or follow at the
    end of the next epoch, stage or validation.

    Subclass it and override `log_metrics` to send them to another destination.

    State: The training metrics that have not been logged yet.
    """

    def __init__(self) -> None:
        self._train: Metrics = {}
        self._val: Metrics = {}
        self._num_validating = 0

    def log_metrics(self, trainer: Trainer, metrics: Metrics) -> None:
        """Process metrics; called in the main process only, with at least one metric.

        Args:
            trainer: The trainer.
            metrics: Host values by name, with the name scopes.
        """
        figures = " | ".join(f"{name} {_text(value)}" for name, value in metrics.items())
        log.info("step %d | %s", trainer.global_step, figures)

    # ---- collecting

    @override
    def on_metrics(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        (self._val if self._num_validating else self._train).update(metrics)

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._train = {}

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        self._begin_validation(trainer, stack)

    @override
    def on_enter_validate_all(
        self,
        trainer: Trainer,
        stack: ExitStack,
        val_dataloaders: list[Loader],
        loop: Any,
        ckpt_paths: list[Any],
    ) -> None:
        self._begin_validation(trainer, stack)

    def _begin_validation(self, trainer: Trainer, stack: ExitStack) -> None:
        if not self._num_validating:
            self._log_training(trainer)  # a run resumed here has not logged it yet
        self._num_validating += 1

        def leave(kind: type[BaseException] | None, *rest: object) -> None:
            if kind is None:
                trainer.drain()  # read the metrics of custom validations
            self._num_validating -= 1
            metrics, self._val = self._val, {}
            self._log(trainer, metrics)

        stack.push(leave)

    # ---- logging

    @override
    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self._log_training(trainer)

    @override
    def on_train_end(self, trainer: Trainer, model: Module, loop: Any, loop_idx: int) -> None:
        self._log_training(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        self._log_training(trainer)

    def _log_training(self, trainer: Trainer) -> None:
        trainer.drain()
        metrics, self._train = self._train, {}
        self._log(trainer, metrics)

    def _log(self, trainer: Trainer, metrics: Metrics) -> None:
        if metrics and trainer.backend.comm.is_main and trainer.backend.caps.holds_values:
            self.log_metrics(trainer, metrics)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics that have not been logged yet."""
        kept = {key: value for key, value in self._train.items() if isinstance(value, _KEPT)}
        return {"train": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the metrics."""
        self._train = dict(state["train"])


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, Real) else str(value)


class LogInputSummaries(Callback):
    """Log the tensors of the batch that the model receives, on log steps.

    Names are `input.<key>` for a batch that is a mapping or a sequence, `input.<key>.<key>` if
    nested, and `input` for a single tensor. With several batches per step, the last one is logged;
    with several processes, the main process's value. Validation batches are logged likewise, with
    the prefix of the validation.

    Metrics:
        input.<path>: The whole tensor; a number if it has no dimensions.

    Cost: On log steps, a copy of the batch to the host.
    """

    needs_one_optimizer = True  # it logs what `forward` gets
    log_step_hooks = frozenset({"on_before_forward"})

    @override
    def on_before_forward(
        self,
        trainer: Trainer,
        model: Module,
        batch: Batch,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        if is_recorded(trainer):
            found = named_tensors(batch)
            trainer.log_metrics_dict({f"input{path}": snapshot(tensor) for path, tensor in found})


class LogOptimizerParamGroup(Callback):
    """Log values of each parameter group, such as the learning rate, on log steps.

    Values are those that the step was taken with: schedulers update them afterwards.
    With several optimizers the names are `<key>/<name>/<group>`, at the first step in a batch.

    Args:
        keys: One or more keys of the parameter groups, such as "lr".

    Metrics:
        <key>/<group>: The value in the group with this index.

    Raises:
        ConfigError: At setup, if no group has a key, or its value is not a number.
    """

    log_step_hooks = frozenset({"on_after_optimizer_step"})

    def __init__(self, keys: str | Iterable[str]) -> None:
        self._keys = (keys,) if isinstance(keys, str) else tuple(keys)

    @override
    def setup(self, trainer: Trainer) -> None:
        if not trainer.has_optimizer:
            return
        optimizers = trainer.optimizers.values()
        groups = [group for one in optimizers for group in one.param_groups]
        for key in self._keys:
            values = [group[key] for group in groups if key in group]
            if not values:
                known = {name for group in groups for name in group if name != "params"}
                raise ConfigError(
                    f"LogOptimizerParamGroup.keys: {key!r} is in no parameter group of "
                    f"{', '.join(type(one).__name__ for one in optimizers)}. {suggest(key, known)}"
                )
            for value in values:
                if not _is_number(value):
                    raise ConfigError(
                        f"LogOptimizerParamGroup.keys: {key!r} is {value!r} in a parameter group, "
                        f"but only numbers can be logged. Remove it from keys."
                    )

    @override
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        suffix = "" if trainer.manual_steps is None else metric_suffix(trainer, optimizer)
        if suffix is None:
            return
        metrics: Metrics = {}
        for key in self._keys:
            for idx, group in enumerate(optimizer.param_groups):
                value = group.get(key)
                if value is not None:
                    # A scheduler updates a tensor in place before it is read.
                    kept = value.detach().clone() if isinstance(value, Tensor) else value
                    metrics[f"{key}{suffix}/{idx}"] = kept
        trainer.log_metrics_dict(metrics)


def _is_number(value: object) -> bool:
    return (
        value is None
        or isinstance(value, Number)
        or (isinstance(value, Tensor) and value.numel() == 1)
    )


sparsity_log = logging.getLogger("modelzoo_trainer.sparsity")


class LogSparsity(Callback):
    """Log the fraction of zero weights of each sparse parameter, on log steps.

    Metrics:
        sparsity/<name>/target: The target fraction, 0 to 1.
        sparsity/<name>/actual: The masked fraction, 0 to 1.

    Cost: Each mask is read once on the device per log step; no host read.
    """

    log_step_hooks = frozenset({"on_after_optimizer_step"})

    def __init__(self) -> None:
        self._sparsity: Sparsity | None = None

    @override
    def setup(self, trainer: Trainer) -> None:
        self._sparsity = trainer.get_callback(Sparsity)
        if self._sparsity is None or not self._sparsity.params:
            sparsity_log.warning(
                "LogSparsity: no parameter is sparse, so nothing is logged. Set sparsity."
            )

    @override
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        if self._sparsity is None or not self._sparsity.params:
            return
        metrics: Metrics = {}
        for name, (target, actual) in self._sparsity.fractions(trainer.global_step).items():
            metrics[f"sparsity/{name}/target"] = target
            metrics[f"sparsity/{name}/actual"] = actual
        trainer.log_metrics_dict(metrics)
