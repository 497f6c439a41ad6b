"""Detection of the first tensor that is not finite."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.base.constraints import PositiveInt, checked
from modelzoo_trainer.callback import Batch, Outputs
from modelzoo_trainer.callbacks.parts.activation_hooks import (
    TensorPath,
    TensorWatcher,
    is_inexact,
    named_params,
    named_tensors,
)

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class NaNChecker(TensorWatcher):
    """Raise an error that names the module whose values first became NaN or infinite.

    Checked in this order: the parameters before the step, the batch, the output of each module as
    it is called, the gradients of these outputs in the backward pass, and the gradients of the
    parameters. The first non-finite one is reported, some steps later on devices that are read
    asynchronously; no checkpoint is written in between. Gradients under a loss scaler are not
    checked, as they are expected to overflow sometimes. A module that outputs an intentional -inf
    mask is reported as well. Compiled models run eagerly in checked steps.

    Args:
        num_steps: Check only the first steps of a fit, > 0, or the first batches of a validation
            outside `fit`; None = all.

    Raises:
        ConfigError: If `num_steps` is invalid.
        FloatingPointError: During the run, with the step, the module and its tensor.

    Cost: In checked steps, a read of all activations, gradients and parameters on the device.
    """

    @checked()
    def __init__(self, num_steps: PositiveInt | None = None) -> None:
        super().__init__()
        self.num_steps = num_steps
        self._num_seen = 0
        self._kinds: list[str] = []
        self._flags: list[Tensor] = []
        self._is_watching = False

    @override
    def enter(self, trainer: Trainer, stack: ExitStack) -> None:
        super().enter(trainer, stack)
        self._num_seen = 0
        stack.callback(self._drop)

    def _drop(self) -> None:
        self._kinds, self._flags = [], []
        self._is_watching = False

    # ---- within the step

    @override
    def is_watched(self, trainer: Trainer) -> bool:
        self._drop()
        self._is_watching = self.num_steps is None or self._num_seen < self.num_steps
        return self._is_watching

    @override
    def before(
        self, trainer: Trainer, model: Module, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        for name, param in named_params(model).items():
            self._note(trainer, f"the parameter {name!r} before the step", param)
        for path, tensor in named_tensors([*args, *kwargs.values()]):
            inner = path.removeprefix(".0")
            self._note(trainer, f"the batch at {inner}" if inner else "the batch", tensor)

    @override
    def process(self, trainer: Trainer, place: TensorPath, tensor: Tensor) -> None:
        what = f"the output of {place.call!r}" + (f" at {place.path}" if place.path else "")
        if place.kind == "fwd":
            self._note(trainer, what, tensor)
        elif not _has_scaler(trainer):
            self._note(trainer, f"the gradient of {what}", tensor)

    @override
    def on_after_backward(self, trainer: Trainer, model: Module, outputs: Outputs) -> None:
        if not self._is_watching or _has_scaler(trainer):
            return
        for name, param in named_params(model).items():
            if param.grad is not None:
                self._note(trainer, f"the gradient of the parameter {name!r}", param.grad)

    def _note(self, trainer: Trainer, what: str, tensor: Tensor) -> None:
        if not is_inexact(tensor) or not tensor.numel():
            return
        part = trainer.backend.comm.local_part(tensor.detach())
        if part.is_sparse:
            part = part._values()
        self._kinds.append(what)
        self._flags.append(torch.isfinite(part).all().logical_not())

    # ---- findings

    @override
    def on_train_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        self._read(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        self._num_seen += trainer.should_run_optimizer_step

    @override
    def on_validate_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        self._read(trainer)

    @override
    def on_validate_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        self._num_seen += not trainer.is_fitting

    def _read(self, trainer: Trainer) -> None:
        kinds, flags = self._kinds, self._flags
        self._drop()
        if flags:
            trainer.read((torch.stack(flags),), partial(self._judge, trainer, kinds))

    def _judge(self, trainer: Trainer, kinds: list[str], values: list[Any]) -> None:
        flags = values[0].tolist()
        if True not in flags:
            return
        first = flags.index(True)
        raise FloatingPointError(
            f"{kinds[first]} is not finite at {trainer.name_scope_path}global_step "
            f"{trainer.global_step}. It is the first of {sum(flags)} non-finite tensors among the "
            f"{len(flags)} of this step."
        )


def _has_scaler(trainer: Trainer) -> bool:
    return getattr(trainer.precision, "scaler", None) is not None
