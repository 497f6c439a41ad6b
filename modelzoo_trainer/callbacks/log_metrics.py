"""Further metrics: the newest at the end of an epoch, batches, parameter groups, sparsity."""

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
from modelzoo_trainer.callbacks.activation_hooks import named_tensors
from modelzoo_trainer.closures import is_recorded, snapshot
from modelzoo_trainer.core.manual_steps import metric_suffix
from modelzoo_trainer.core.sparsity import Sparsity
from modelzoo_trainer.errors import ConfigError, suggest

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.metrics")


_KEPT: Final = (int, float, str, Tensor)


class LogMetrics(Callback):
    """Logs the newest value of each metric where an epoch, a train stage or a validation ends.

    Those of training come where an epoch or a train stage ends, those of a validation when it is
    complete; which of them a metric is, is decided by when it was logged, not by its name. Nothing
    is logged twice. What callbacks behind this one log is not missed: it comes with the rest, or
    where the next epoch, stage or validation ends.

    Subclass it and override `log_metrics` to send them somewhere else than to the log.

    State: The values of training that have not been reported yet.
    """

    def __init__(self) -> None:
        self._train: Metrics = {}
        self._val: Metrics = {}
        self._num_validating = 0

    def log_metrics(self, trainer: Trainer, metrics: Metrics) -> None:
        """Take metrics; called in the first process only, with one at least.

        Args:
            trainer: The trainer.
            metrics: Names, with their scopes, and host values.
        """
        figures = " | ".join(f"{name} {_text(value)}" for name, value in metrics.items())
        log.info("step %d | %s", trainer.global_step, figures)

    # ---- what comes

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
            self._tell_training(trainer)  # a run that resumes here has not logged it yet
        self._num_validating += 1

        def leave(kind: type[BaseException] | None, *rest: object) -> None:
            if kind is None:
                trainer.drain()  # what validations of one's own have logged
            self._num_validating -= 1
            metrics, self._val = self._val, {}
            self._tell(trainer, metrics)

        stack.push(leave)

    # ---- what is reported

    @override
    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self._tell_training(trainer)

    @override
    def on_train_end(self, trainer: Trainer, model: Module, loop: Any, loop_idx: int) -> None:
        self._tell_training(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        self._tell_training(trainer)

    def _tell_training(self, trainer: Trainer) -> None:
        trainer.drain()
        metrics, self._train = self._train, {}
        self._tell(trainer, metrics)

    def _tell(self, trainer: Trainer, metrics: Metrics) -> None:
        if metrics and trainer.backend.comm.is_main and trainer.backend.caps.holds_values:
            self.log_metrics(trainer, metrics)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return what has not been reported yet."""
        kept = {key: value for key, value in self._train.items() if isinstance(value, _KEPT)}
        return {"train": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._train = dict(state["train"])


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, Real) else str(value)


class LogInputSummaries(Callback):
    """Logs every tensor of the batch as it goes into the model, on log steps.

    A batch that is a mapping or a sequence gives `input.<key>`, nested ones `input.<key>.<key>`,
    and a tensor alone `input`. Of a step over several batches it is the last one that is logged,
    of several processes that of the main one. In a validation likewise, with its prefix.

    Metrics:
        input.<path>: The tensor, whole; a number if it has no dimensions.

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
    """Logs values of each parameter group as `<key>/<group>`, on log steps.

    They are those that the step was taken with: a scheduler acts afterwards. Of several optimizers
    the names are `<key>/<name>/<group>`, and the step is the first one with a batch.

    Args:
        keys: A key of the groups, such as "lr", or several.

    Metrics:
        <key>/<group>: The value as it is in the group, which is counted from 0.

    Raises:
        ConfigError: At set-up, if no group has a key, or its value is not a number.
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
                    f"keys: {key!r} is in no parameter group of "
                    f"{', '.join(type(one).__name__ for one in optimizers)}. {suggest(key, known)}"
                )
            for value in values:
                if not _is_number(value):
                    raise ConfigError(
                        f"keys: {key!r} is {value!r} in the parameter groups; only numbers can "
                        f"be logged."
                    )

    @override
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        suffix = metric_suffix(trainer, optimizer)
        if suffix is None:
            return
        metrics: Metrics = {}
        for key in self._keys:
            for idx, group in enumerate(optimizer.param_groups):
                value = group.get(key)
                if value is not None:
                    # A scheduler fills a tensor in place before it is read.
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
    """Logs which fraction of the weights of each sparse parameter is zero, on log steps.

    Metrics:
        sparsity/<name>/target: The fraction that is meant, 0 to 1.
        sparsity/<name>/actual: The fraction that is masked, 0 to 1.

    Cost: Each mask is read once on the device per log step; no host read.
    """

    log_step_hooks = frozenset({"on_after_optimizer_step"})

    def __init__(self) -> None:
        self._sparsity: Sparsity | None = None

    @override
    def setup(self, trainer: Trainer) -> None:
        self._sparsity = trainer.get_callback(Sparsity)
        if self._sparsity is None or not self._sparsity.params:
            sparsity_log.warning("LogSparsity: the trainer has no sparsity, so nothing is logged.")

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
