"""Exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Predicate
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.base.constraints import Fraction, Name, PositiveInt, checked
from modelzoo_trainer.base.dtypes import FloatOfAverage, torch_dtype
from modelzoo_trainer.callback import (
    Batch,
    Callback,
    Loader,
    Outputs,
    StateDict,
    ValidationCallback,
)
from modelzoo_trainer.callbacks.step_based_evaluation import StepBasedEvaluation
from modelzoo_trainer.callbacks.step_guard import StepGuard
from modelzoo_trainer.callbacks.weight_average import WeightAverage
from modelzoo_trainer.core.model import ModelCallback
from modelzoo_trainer.core.parts.step_check import StepCheck
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

Prefix = Annotated[Name, Predicate(lambda text: text.strip("/") == text), "a prefix such as 'ema'"]


class _AtStepEnd(Callback):
    """Updates the average after a batch with several optimizers."""

    def __init__(self, update: Callable[[], None]) -> None:
        self._update = update

    @override
    def on_train_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        self._update()


class ModelEma(ValidationCallback):
    """Keep an exponential moving average (EMA) of the weights, and validate it.

    After each optimizer step, average = `decay` * average + (1 - `decay`) * weights; it starts as
    the weights before the first step. Steps that are skipped by `CheckLoss` or by a loss scaler do
    not count. With several optimizers the average is updated once per batch, unless a loss scaler
    skipped one of its steps. Frozen parameters and buffers that are not floating-point are not
    averaged; a parameter that is added or unfrozen later is averaged from the next step on.

    `swap()` is a context manager in which the model has the averaged weights; `ExtraCheckpoint`
    and `HuggingFaceCheckpoint` write them with `averaged`. A checkpoint of the run that is saved
    inside, or while the average is validated, has the trained weights.

    Args:
        decay: Weight of the average in an update, in [0, 1).
        warmup: Whether to increase the decay gradually: min(decay, (1 + n) / (10 + n)) after n
            steps.
        average_buffers: Whether to average floating-point buffers; False = use the model's.
        dtype: Of the average; None = the parameter's, or float32 for half precision.
        validate: Whether to validate the averaged weights after each validation of the weights,
            except those that `StepBasedEvaluation` adds.
        every_n_vals: Validate only on every n-th validation of a run, > 0, and on the last one.
        name_scope: Prefix of the metrics of these validations.

    State: The averages and the number of steps in them.

    Metrics:
        ema/validate_<i>/loss: As `validate_<i>/loss`, for the averaged weights; likewise all other
            metrics of a validation.

    Cost: A step reads and writes the average once, in one kernel launch for all tensors of a dtype.
        `validate` doubles the time of validations, and takes another copy of the weights meanwhile.

    Raises:
        ConfigError: If an argument is invalid.
    """

    needs_trainer = True

    @checked()
    def __init__(  # noqa: PLR0913  # the keys of its YAML section
        self,
        decay: Fraction = 0.999,
        *,
        warmup: bool = False,
        average_buffers: bool = True,
        dtype: FloatOfAverage | None = None,
        validate: bool = True,
        every_n_vals: PositiveInt = 1,
        name_scope: Prefix = "ema",
    ) -> None:
        self.decay = decay
        self.warmup = warmup
        self.average_buffers = average_buffers
        self.dtype = None if dtype is None else torch_dtype(dtype)
        self.validates = validate
        self._every_n_vals = every_n_vals
        self._name_scope = name_scope
        self._average: WeightAverage | None = None
        self._loaded: dict[str, Any] | None = None
        self._model_owner: ModelCallback | None = None
        self._inference: Callable[[], AbstractContextManager[Any]] | None = None
        self._guard: StepGuard | None = None
        self._check: StepCheck | None = None
        self._overflows: list[Tensor] = []
        self._counts_on_device = False
        self._val: tuple[list[Loader], Any] | None = None

    @override
    def setup(self, trainer: Trainer) -> None:
        owner = trainer.callbacks["model"]
        self._model_owner = owner if isinstance(owner, ModelCallback) else None
        if self._average is not None and self._average.model is not trainer.model:
            self._average = None  # of another trainer
        same = [one for one in trainer.get_callbacks(ModelEma) if one.name_scope == self.name_scope]
        if len([one for one in same if one.validates]) > 1:
            raise ConfigError(
                f"Two ModelEma callbacks have the name_scope {self.name_scope!r}, so their metrics "
                f"would have the same names. Change one name_scope, or set validate=False in one."
            )

    # ---- the average

    def _begin(self, trainer: Trainer) -> None:
        """Start from the current weights, or from the average of a checkpoint."""
        backend = trainer.backend
        self._inference = backend.inference
        self._counts_on_device = backend.caps.static_shapes
        self._average = WeightAverage(
            trainer.model,
            self.decay,
            warms_up=self.warmup,
            averages_buffers=self.average_buffers,
            dtype=self.dtype,
            launches_cost=backend.device != torch.empty(0).device,
            part=backend.comm.local_part,
            settle=self._free_gathered,
        )
        if self._loaded is not None:
            self._average.load_state_dict(self._loaded, backend.for_loading)
            self._loaded = None

    @property
    def has_average(self) -> bool:
        """Whether training has begun, or a checkpoint with an average was loaded."""
        return self._average is not None

    @property
    def average(self) -> WeightAverage:
        """The average.

        Raises:
                RuntimeError: If there is no average yet.
        """
        if self._average is None:
            raise RuntimeError(
                "ModelEma has no averaged weights yet. It has them once a fit has started, or once "
                "a checkpoint with averaged weights is loaded."
            )
        return self._average

    def update(self) -> None:
        """Update the average with the current weights, as a step does."""
        self.average.update()

    def set(self) -> None:
        """Set the average to the current weights."""
        self.average.set()

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Context manager in which the model has the averaged weights.

        Raises:
            RuntimeError: If there is no average, or it is nested.
        """
        average, owner = self.average, self._model_owner
        told = nullcontext() if owner is None else owner.replaced(average.swapped_back)
        with average.swap(), told:
            yield

    def _free_gathered(self) -> None:
        """Free parameters that a call of a sharded model has gathered, which would not change."""
        if self._inference is not None:
            with self._inference():
                pass

    # ---- the step

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        if trainer.manual_steps is not None:
            stack.callback(trainer.add_callback(_AtStepEnd(self._take_in)).remove)

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._guard = trainer.get_callback(StepGuard)

    @override
    def on_train_start(
        self,
        trainer: Trainer,
        model: Module,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        if self._average is not None:
            self._average.track()
        elif not any(map(is_lazy, model.parameters())):  # lazy parameters have no values yet
            self._begin(trainer)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        if self._average is None:
            self._begin(trainer)
        if self._guard is not None:
            self._check = self._guard.check
        overflows = trainer.precision.overflows(optimizer)
        self._overflows = (
            overflows if trainer.manual_steps is None else [*self._overflows, *overflows]
        )

    @override
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        if self._guard is not None and self._check is None:  # the guard is called after this
            self._check = self._guard.check

    @override
    def on_before_optimizer_zero_grad(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        if trainer.manual_steps is None:
            self._take_in()

    def _take_in(self) -> None:
        # Not earlier: by now the buffers of a skipped step have been restored.
        self.average.update(self._keep(), counts_on_device=self._counts_on_device)

    def _keep(self) -> Tensor | None:
        """Return whether the step was taken, (), on the device; None = it was."""
        if self._guard is None and not self._overflows:
            return None
        check, self._check = self._check, None
        left_out = [check.bad.reshape(())] if check is not None and check.masks else []
        left_out += [overflow.reshape(()) > 0 for overflow in self._overflows]
        self._overflows = []
        return torch.stack(left_out).any().logical_not() if left_out else None

    # ---- validation

    @property
    @override
    def name_scope(self) -> str:
        return self._name_scope

    @property
    @override
    def every_n_vals(self) -> int:
        return self._every_n_vals

    @property
    @override
    def num_validate_loops(self) -> int:
        return 1

    @override
    def on_enter_validate_all(
        self,
        trainer: Trainer,
        stack: ExitStack,
        val_dataloaders: list[Loader],
        loop: Any,
        ckpt_paths: list[Any],
    ) -> None:
        self._val = val_dataloaders, loop
        stack.callback(setattr, self, "_val", None)

    @override
    def run_validation(self, trainer: Trainer, loop_idx: int | None, is_last: bool) -> None:
        added = trainer.get_callback(StepBasedEvaluation)
        if added is not None and loop_idx is not None:
            if added.is_intermediate(trainer):
                return
            loop_idx = added.own_idx(trainer)
        is_wanted = self.validates and self.is_due(loop_idx, is_last)
        if not is_wanted or self._average is None or self._val is None:
            return
        val_dataloaders, loop = self._val
        with self.swap():
            for val_dataloader in val_dataloaders:
                trainer.validate(val_dataloader, ckpt_path=None, loop=loop)
                if trainer.early_exit.should_exit or not trainer.val_is_complete:
                    return

    # ---- state

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        if ckpt_path is not None and self._average is not None and self._average.is_swapped:
            raise ConfigError(
                f"ckpt_path: {str(ckpt_path)!r} cannot be loaded while the model has the averaged "
                f"weights of ModelEma, which would then be mixed with it. Load it outside 'with "
                f"ema.swap()' and outside the validation of the average."
            )

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if self._loaded is not None:
            self._begin(trainer)
        elif "model" in state_dict:  # new weights without an average
            self._average = None

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and their count."""
        if self._loaded is not None:
            return self._loaded
        return {} if self._average is None else self._average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state until the model exists."""
        self._loaded = dict(state) or None
