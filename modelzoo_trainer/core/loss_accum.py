"""The logged loss: unscaled, averaged over samples or items."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.base.devices import Backend, Exchange, map_tensors
from modelzoo_trainer.callback import Batch, CoreCallback, Loader, Outputs, StateDict
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.labels import ValidationLabels

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class WeightedMean:
    """A weighted mean on the device, in double precision where the device has it."""

    def __init__(self, *, double: bool) -> None:
        self._dtype = torch.float64 if double else torch.float32
        self._sum: Tensor | None = None
        self._weight: Any = 0

    def add(self, value: Tensor, weight: Any) -> None:
        """Add a scalar with its weight."""
        term = value.detach().to(self._dtype) * weight
        if isinstance(weight, Tensor):  # the mean of no items is NaN
            term = torch.where(weight == 0, torch.zeros_like(term), term)
        self._sum = term if self._sum is None else self._sum + term
        self._weight = self._weight + weight

    def take(self) -> Tensor | None:
        """Return the mean and reset; 0 if all weights are 0, None if nothing was added."""
        total, weight = self._sum, self._weight
        self._sum, self._weight = None, 0
        return None if total is None else _quotient(total, weight)

    def pair(self) -> Tensor:
        """Return the weighted sum and the weight, (2,), and reset."""
        total, weight = self._sum, self._weight
        self._sum, self._weight = None, 0
        assert total is not None  # something was added
        counted = weight.to(total) if isinstance(weight, Tensor) else torch.full_like(total, weight)
        return torch.stack((total, counted))

    @property
    def is_used(self) -> bool:
        """Whether anything was added."""
        return self._sum is not None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the exact state; None if nothing was added."""
        return None if self._sum is None else {"sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any] | None, device: torch.device) -> None:
        """Restore a state to the device of future values."""
        self.take()
        if state is not None:
            found = map_tensors(state, lambda tensor: tensor.to(device, copy=True))
            self._sum, self._weight = found["sum"].to(self._dtype), found["weight"]


def take_all(means: Mapping[str, WeightedMean], backend: Backend) -> dict[str, Tensor | None]:
    """Return the means over all processes, and reset.

    All processes have the same names, each with at least one value; see `NamedMeans` for others.

    Cost: One message, if there are several processes. Collective.
    """
    if backend.comm.world_size == 1:
        return {name: mean.take() for name, mean in means.items()}
    if not means:
        return {}
    sums, weights = backend.comm.reduce(torch.stack([mean.pair() for mean in means.values()])).T
    return dict(zip(means, _quotient(sums, weights).unbind(), strict=True))


Function = Callable[[Tensor], Tensor]
_PLAIN: Final = "without a function"
_WITH_FUNCTION: Final = "with a function"


class NamedMeans:
    """Weighted means over all batches and processes, which may have different names.

    A mean is over the processes that have its name: the others count with weight 0. The names are
    sent once, and again when they change on any process.
    """

    def __init__(self) -> None:
        self._means: dict[str, WeightedMean] = {}
        self._functions: dict[str, Function | None] = {}
        self._kinds: dict[str, str] = {}
        self._exchange = Exchange()

    def add(
        self,
        backend: Backend,
        name: str,
        value: Tensor,
        weight: Any,
        function: Function | None = None,
        kind: str = "",
    ) -> None:
        """Add a scalar with its weight.

        Args:
            backend: The backend of the value.
            name: The name of the mean.
            value: A tensor with one element.
            weight: Its weight.
            function: Of the mean, which `take` returns in its place; None = the mean itself.
            kind: What the weight counts, equal on all processes; not with a function.
        """
        if name not in self._means:
            self._means[name] = WeightedMean(double=backend.caps.float64)
            self._kinds[name] = kind or (_PLAIN if function is None else _WITH_FUNCTION)
        self._means[name].add(value, weight)
        self._functions[name] = function

    def drop(self) -> None:
        """Drop all values."""
        self._means, self._functions, self._kinds = {}, {}, {}

    def take(self, backend: Backend) -> dict[str, Tensor | None]:
        """Return the means over all processes, and drop all values.

        The names come from all processes, in the same order on all.

        Raises:
            ConfigError: On all processes, if values of a name cannot be averaged over them.

        Cost: Two small messages, if there are several processes. Collective.
        """
        means, functions, kinds = self._means, self._functions, self._kinds
        self.drop()
        if backend.comm.world_size == 1:
            return {name: _applied(functions[name], mean.take()) for name, mean in means.items()}
        pairs = {name: mean.pair() for name, mean in means.items()}
        own = {
            name: kinds[name] if pair.numel() == 2 else f"shape {tuple(pair.shape[1:])}"
            for name, pair in pairs.items()
        }
        found: list[dict[str, str]] = self._exchange.gather(backend.comm, own)
        names = list(dict.fromkeys(name for one in found for name in one))
        _check_kinds(names, found)
        if not names:
            return {}
        dtype = torch.float64 if backend.caps.float64 else torch.float32
        nothing = torch.zeros(2, dtype=dtype, device=backend.device)
        rows = [pairs[name].view(2).to(nothing) if name in pairs else nothing for name in names]
        sums, weights = backend.comm.reduce(torch.stack(rows)).T
        all_means = dict(zip(names, _quotient(sums, weights).unbind(), strict=True))
        return self._finished(backend, all_means, functions, found)

    def _finished(
        self,
        backend: Backend,
        means: dict[str, Tensor],
        functions: Mapping[str, Function | None],
        found: list[dict[str, str]],
    ) -> dict[str, Tensor | None]:
        """Apply the functions; a process without one gets the result of another."""
        finished = {name: _applied(functions.get(name), mean) for name, mean in means.items()}
        shard, num_shards = backend.comm.data_shard
        of_shards = found[:: backend.comm.world_size // num_shards]
        for name, mean in means.items():
            with_name = [number for number, one in enumerate(of_shards) if name in one]
            has_function = of_shards[with_name[0]][name] == _WITH_FUNCTION
            if has_function and len(with_name) < num_shards:
                own = finished[name] if shard == with_name[0] else None
                part = torch.zeros_like(mean) if own is None else own.to(mean)
                finished[name] = backend.comm.reduce(part)
        return finished


def _applied(function: Function | None, mean: Tensor | None) -> Tensor | None:
    return mean if function is None or mean is None else function(mean)


def _check_kinds(names: list[str], found: list[dict[str, str]]) -> None:
    """Check that the values of each name can be averaged over processes."""
    for name in names:
        kinds: dict[str, int] = {}
        for rank, one in enumerate(found):
            if name in one:
                kinds.setdefault(one[name], rank)
        has_shape = any(kind.startswith("shape") for kind in kinds)
        if has_shape or len(kinds) > 1:
            where = "; ".join(f"process {rank}: {kind}" for kind, rank in kinds.items())
            advice = "a tensor with one element" if has_shape else "the same on all processes"
            raise ConfigError(
                f"The validation metric {name!r} cannot be averaged over the processes ({where}). "
                f"Return {advice}."
            )


def _quotient(sums: Tensor, weights: Any) -> Tensor:
    """Return means; where the weight is 0, the sum, which is 0."""
    if isinstance(weights, Tensor):
        return torch.where(weights == 0, sums, sums / weights)
    return sums / (weights or 1)


class LossAccumulation(CoreCallback):
    """Log `loss`: of each logged step, and of a whole validation.

    Averages over the batches of a step, over a validation and over processes are weighted by
    samples, or by `num_items` if the model's output has it. An incomplete validation logs nothing.

    Args:
        num: Batches per optimizer step.

    State: `loss_accum`, within a step only: the average so far.
    """

    def __init__(self, num: int = 1) -> None:
        if num == 1:
            self.log_step_hooks = frozenset({"on_train_step_end"})
        self._train = WeightedMean(double=True)
        self._val = NamedMeans()
        self._labels = ValidationLabels()
        self._is_alone = True

    def activate(self) -> None:
        """Average even if `num` is 1, for micro-batches; the caller rebuilds the hooks."""
        if self._is_alone:
            self.log_step_hooks = frozenset()

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        self._train = WeightedMean(double=trainer.backend.caps.float64)
        self._is_alone = trainer.backend.comm.world_size == 1
        if not self._is_alone:  # losses are reduced with the weights
            self.log_step_hooks = frozenset({"on_train_step_end"})

    @override
    def on_enter_train(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        stack.callback(self._train.take)

    @override
    def on_train_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        if not trainer.grad_accum.is_active:
            own = outputs["loss"].detach()
            manual = trainer.manual_steps
            loss = own if manual is None else manual.mean_loss(trainer, own)
            trainer.log_metrics_dict({"loss": loss})
            return
        if not self._is_alone:
            if trainer.should_run_optimizer_step:
                weight, total = trainer.backend.window.sums()
                trainer.log_metrics_dict({"loss": _quotient(total, weight)})
            return
        if (
            not trainer.logging.is_log_window
            and trainer.schedule.total_steps is not None
            and not trainer.rehearses
        ):
            return  # if the end is unknown, any window may be the last one, which is logged
        self._train.add(outputs["loss"], trainer.grad_accum.weight)
        if trainer.should_run_optimizer_step:
            trainer.log_metrics(loss=self._train.take())

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        self._labels.reset()
        stack.callback(self._val.drop)

    @override
    def on_validate_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        if "loss" in outputs:
            weight = trainer.weight_of(outputs, batch)
            kind = "weighted by samples"
            if outputs.get("num_items") is not None:
                kind = "weighted by num_items"
            self._val.add(trainer.backend, "loss", outputs["loss"], weight, kind=kind)
            self._labels.add(trainer.model, batch, weight)

    @override
    def on_validate_end(self, trainer: Trainer, model: Module, loop: Any) -> None:
        if trainer.val_is_complete:
            self._labels.require_any(trainer.backend, trainer.read)
            trainer.log_metrics_dict(self._val.take(trainer.backend))
        self._val.drop()

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        mean = self._train.state_dict()
        if mean is not None:
            state_dict["loss_accum"] = trainer.backend.state_view(mean)

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        mean = state_dict.get("loss_accum") if trainer.grad_accum.is_active else None
        self._train.load_state_dict(mean, trainer.backend.device)
