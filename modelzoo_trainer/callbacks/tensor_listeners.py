"""Tensors of a step, chosen by their names: listed, logged, measured."""

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

from modelzoo_trainer.callback import Batch, Outputs
from modelzoo_trainer.callbacks.activation_hooks import NamesTensors, is_inexact
from modelzoo_trainer.closures import is_recorded, snapshot
from modelzoo_trainer.constraints import Name, Names, checked
from modelzoo_trainer.errors import ConfigError, suggest

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.tensor_listeners")

_ALL: Final = "__all__"


TensorNames = (
    Annotated[Name, "a name such as 'layers.*.fwd' (DumpAvailableTensorNames lists them)"] | Names
)


class TensorListener(NamesTensors):
    """Base of the callbacks that log something of the tensors with certain names, on log steps.

    Args:
        listener_name: Goes before the names in the metrics.
        tensor_names: A name or a pattern with `*`, `?` and `[...]`, or several.
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
        self._is_told = False
        self.found: dict[str, Any] = {}

    @abstractmethod
    def take(self, trainer: Trainer, name: str, tensor: Tensor) -> None:
        """Keep in `found` what is to be logged of a tensor that was chosen."""

    def close(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return what is logged, by names without the listener's."""
        return found

    @override
    def enter(self, trainer: Trainer, stack: ExitStack) -> None:
        super().enter(trainer, stack)
        self._fits = {}
        self._unmatched = set(self.tensor_names)
        self._is_told = False
        stack.callback(setattr, self, "found", {})

    @override
    def wants(self, trainer: Trainer) -> bool:
        return is_recorded(trainer)

    @override
    def before(
        self, trainer: Trainer, model: Module, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        self.found = {}
        super().before(trainer, model, args, kwargs)

    @override
    def see_named(self, trainer: Trainer, name: str, tensor: Tensor) -> None:
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
        self._tell_unmatched()

    @override
    def on_validate_end(self, trainer: Trainer, model: Module, loop: Any) -> None:
        self._tell_unmatched()

    def _tell_unmatched(self) -> None:
        if self._is_told or not self._fits:
            return
        self._is_told = True
        for pattern in sorted(self._unmatched):
            log.warning(
                "%s.tensor_names: %r is the name of no tensor of a step. %s "
                "DumpAvailableTensorNames lists all.",
                type(self).__name__,
                pattern,
                _near(pattern, list(self._fits)),
            )


class SummaryTensorListener(TensorListener):
    """Logs the tensors with certain names, on log steps, as `<listener_name>/<tensor>`.

    These tensors have names:

    * `<module>.fwd`: what a module puts out. The second call of a batch is `<module>.call1.fwd`;
      parts of a mapping or a sequence have their key after it, as in `Net.fwd.loss`. The model
      itself goes by the name of its class, a module with several names by its first.
    * `<module>.bwd`: the gradient of that, as the backward pass has it: of the last batch of a
      step, and scaled under a loss scaler.
    * `<parameter>`, before the update, and `<parameter>.grad`: its gradient, before clipping.

    In a validation there are no gradients. Those of the main process are logged. A
    compiled model runs as it is written on log steps. A name that fits no tensor of the first log
    step is warned of, with those that are near.

    Args:
        listener_name: Goes before the names in the metrics.
        tensor_names: A name or a pattern with `*`, `?` and `[...]`, or several.

    Metrics:
        <listener_name>/<tensor>: The tensor, whole; a number if it has no dimensions.

    Raises:
        ConfigError: If an argument does not fit; at set-up, if the state is sharded.

    Cost: On log steps, a copy of each tensor to the host.
    """

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.backend.caps.sharded_state:
            raise ConfigError(
                "SummaryTensorListener logs whole tensors, and each process has only a part of "
                "them. Use NormTensorListener, or run without sharding."
            )

    @override
    def take(self, trainer: Trainer, name: str, tensor: Tensor) -> None:
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        self.found[name] = snapshot(tensor)


class NormTensorListener(TensorListener):
    """Logs the 2-norms of the tensors with certain names, on log steps.

    For the names see `SummaryTensorListener`. Tensors of whole numbers have no norm here. Of
    several processes, norms of module outputs are of the main process, those of parameters and
    their gradients are of the whole.

    Args:
        listener_name: Goes before the names in the metrics.
        tensor_names: A name or a pattern with `*`, `?` and `[...]`, or several.

    Metrics:
        <listener_name>/<tensor>: 2-norm of the tensor.
        <listener_name>/__all__: 2-norm of all these together.

    Raises:
        ConfigError: If an argument does not fit.

    Cost: On log steps, a norm for each tensor.
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
    """Return a sentence with the names that are near; of many, some."""
    sentence = suggest(pattern, known)
    if sentence.startswith("Known") and len(known) > 10:
        return f"Known: {', '.join(known[:10])}, ..."
    return sentence
