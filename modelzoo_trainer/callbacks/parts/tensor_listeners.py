"""Logging of tensors of a step, selected by name."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Final

from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.base.constraints import Name, Names, checked
from modelzoo_trainer.callback import Batch, Outputs
from modelzoo_trainer.callbacks.parts.activation_hooks import NamedTensorWatcher, is_inexact
from modelzoo_trainer.core.parts.closures import is_recorded, snapshot
from modelzoo_trainer.errors import ConfigError, suggest

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.tensor_listeners")

_ALL: Final = "__all__"


TensorNames = (
    Annotated[Name, "a name such as 'layers.*.fwd' (DumpAvailableTensorNames lists them)"] | Names
)


class TensorListener(NamedTensorWatcher):
    """Base class of callbacks that log tensors with given names, on log steps.

    Args:
        listener_name: Prefix of the metrics.
        tensor_names: One or more names or patterns with `*`, `?` and `[...]`.
    """

    log_step_hooks = frozenset(
        {
            "on_before_forward",
            "on_after_forward",
            "on_before_optimizer_step",
            "on_train_step_end",
            "on_train_batch_end",
        }
    )

    @checked()
    def __init__(self, listener_name: Name, tensor_names: TensorNames) -> None:
        super().__init__()
        names = [tensor_names] if isinstance(tensor_names, str) else tensor_names
        self.listener_name = listener_name
        self.tensor_names = tuple(names)
        self._fits: dict[str, bool] = {}
        self._unmatched = set(self.tensor_names)
        self._has_warned = False
        self.found: dict[str, Any] = {}

    @abstractmethod
    def take(self, trainer: Trainer, name: str, tensor: Tensor) -> None:
        """Add to `found` what is to be logged of a selected tensor."""

    def close(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return what is logged, by name without the listener's."""
        return found

    @override
    def enter(self, trainer: Trainer, stack: ExitStack) -> None:
        super().enter(trainer, stack)
        self._fits = {}
        self._unmatched = set(self.tensor_names)
        self._has_warned = False
        stack.callback(setattr, self, "found", {})

    @override
    def is_watched(self, trainer: Trainer) -> bool:
        return is_recorded(trainer)

    @override
    def before(
        self, trainer: Trainer, model: Module, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        self.found = {}
        super().before(trainer, model, args, kwargs)

    @override
    def process_named(self, trainer: Trainer, name: str, tensor: Tensor) -> None:
        fits = self._fits.get(name)
        if fits is None:
            patterns = {pattern for pattern in self.tensor_names if fnmatchcase(name, pattern)}
            self._unmatched -= patterns
            self._fits[name] = fits = bool(patterns)
        if fits:
            self.take(trainer, name, tensor.detach())

    # ---- logging

    @override
    def on_train_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        self._log(trainer)

    @override
    def on_validate_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        found, self.found = self.found, {}
        if found:
            metrics = self.close(found)
            name = self.listener_name
            trainer.log_metrics_dict({f"{name}/{key}": value for key, value in metrics.items()})

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        self._warn_unmatched()

    @override
    def on_validate_end(self, trainer: Trainer, model: Module, loop: Any) -> None:
        self._warn_unmatched()

    def _warn_unmatched(self) -> None:
        if self._has_warned or not self._fits:
            return
        self._has_warned = True
        for pattern in sorted(self._unmatched):
            log.warning(
                "%s.tensor_names: %r matches no tensor of a step. %s Add the callback "
                "DumpAvailableTensorNames to list the names.",
                type(self).__name__,
                pattern,
                _near(pattern, list(self._fits)),
            )


class SummaryTensorListener(TensorListener):
    """Log tensors of a step, selected by name, on log steps.

    These tensors have names:

    * `<module>.fwd`: the output of a module. The output of its second call in a batch is
      `<module>.call1.fwd`; an item of a mapping or a sequence has its key appended, as in
      `Net.fwd.loss`. The model itself is named after its class; a module with several names has the
      first one.
    * `<module>.bwd`: the gradient with respect to that output, in the last batch of a step, scaled
      under a loss scaler.
    * `<parameter>`, before the update, and `<parameter>.grad`, its gradient before clipping.

    There are no gradients in validations. The tensors of the main process are logged. Compiled
    models run eagerly on log steps. A name that matches no tensor of the first log step causes a
    warning with the nearest names.

    Args:
        listener_name: Prefix of the metrics.
        tensor_names: One or more names or patterns with `*`, `?` and `[...]`.

    Metrics:
        <listener_name>/<tensor>: The whole tensor; a number if it has no dimensions.

    Raises:
        ConfigError: If an argument is invalid; at setup, if the state is sharded.

    Cost: On log steps, a copy of each tensor to the host.
    """

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.backend.caps.sharded_state:
            raise ConfigError(
                "SummaryTensorListener does not work with sharded tensors (backend.parallel.shard "
                "or tensor). Use NormTensorListener, or set backend.parallel to {replicate: -1}."
            )

    @override
    def take(self, trainer: Trainer, name: str, tensor: Tensor) -> None:
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        self.found[name] = snapshot(tensor)


class NormTensorListener(TensorListener):
    """Log the 2-norms of tensors of a step, selected by name, on log steps.

    The names are explained in `SummaryTensorListener`. Integer tensors are ignored. With several
    processes, norms of module outputs come from the main process; norms of parameters and
    gradients are over all processes.

    Args:
        listener_name: Prefix of the metrics.
        tensor_names: One or more names or patterns with `*`, `?` and `[...]`.

    Metrics:
        <listener_name>/<tensor>: 2-norm of the tensor.
        <listener_name>/__all__: 2-norm of all these tensors together.

    Raises:
        ConfigError: If an argument is invalid.

    Cost: On log steps, one norm per tensor.
    """

    @override
    def take(self, trainer: Trainer, name: str, tensor: Tensor) -> None:
        if not is_inexact(tensor) or not tensor.numel():
            return
        if tensor.is_sparse:
            tensor = tensor.coalesce().values()
        [self.found[name]] = trainer.backend.norms.tensor_norms([tensor])

    @override
    def close(self, found: dict[str, Any]) -> dict[str, Any]:
        squares = [norm.square() for norm in found.values()]
        return found | {_ALL: sum(squares[1:], squares[0]).sqrt()}


def _near(pattern: str, known: Sequence[str]) -> str:
    """Return a sentence with the nearest names, or the first known ones."""
    sentence = suggest(pattern, known)
    if sentence.startswith("Known") and len(known) > 10:
        return f"Known: {', '.join(known[:10])}, ..."
    return sentence
