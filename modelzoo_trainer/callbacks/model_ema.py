"""An average of the weights, beside the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import Loader, StateDict, ValidationCallback
from modelzoo_trainer.callbacks.step_based_evaluation import StepBasedEvaluation
from modelzoo_trainer.callbacks.step_guard import StepGuard
from modelzoo_trainer.callbacks.weight_average import WeightAverage
from modelzoo_trainer.core.loop import require_count
from modelzoo_trainer.core.step_check import StepCheck
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

Dtype = Literal["float32", "float64", "bfloat16"]

_DTYPES: Final = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
}


class ModelEma(ValidationCallback):
    """Keeps an exponential moving average of the weights, and validates it as well.

    After each optimizer step the average becomes `decay * average + (1 - decay) * weights`; it
    begins as the weights before the first step. Steps that are left out, by `CheckLoss` or by a
    loss scaler, do not count. Frozen parameters and buffers that are not floating-point numbers are
    as the model has them.

    `swap()` gives the model the averaged weights for the length of a `with` block, wherever a
    callback or a script needs them; `ExtraCheckpoint` writes them with `averaged`.

    Args:
        decay: How much of the average stays at a step, in [0, 1).
        warmup: Let the decay rise: min(decay, (1 + n) / (10 + n)) after n steps.
        average_buffers: False = buffers as the model has them.
        dtype: Of the average; None = as the parameter, float32 where that is a half type.
        validate: Validate the averaged weights, too, after each validation of the weights; not
            after those that `StepBasedEvaluation` adds.
        every_n_vals: At every n-th validation of a run only, > 0, and the last one.
        name_scope: The prefix of the metrics of these validations.

    State: The averages and the number of steps in them.

    Metrics:
        ema/validate_<i>/loss: As `validate_<i>/loss`, of the averaged weights; likewise all
            else that a validation logs.

    Cost: A step reads and writes the average once, in one launch for all tensors of a type. With
        `validate`, a second pass over the validation data, and a second copy meanwhile.

    Raises:
        ConfigError: If an argument does not fit.
    """

    needs_trainer = True

    def __init__(  # noqa: PLR0913  # the keys of its YAML section
        self,
        decay: float = 0.999,
        *,
        warmup: bool = False,
        average_buffers: bool = True,
        dtype: Dtype | None = None,
        validate: bool = True,
        every_n_vals: int = 1,
        name_scope: str = "ema",
    ) -> None:
        is_number = isinstance(decay, (int, float)) and not isinstance(decay, bool)
        if not is_number or not 0 <= decay < 1:
            raise ConfigError(f"ModelEma.decay is {decay!r}; it must be a number in [0, 1).")
        if dtype not in (None, *get_args(Dtype)):
            raise ConfigError(
                f"ModelEma.dtype is {dtype!r}; it must be one of {', '.join(_DTYPES)}, or None "
                f"(null)."
            )
        require_count("ModelEma.every_n_vals", every_n_vals)
        if not isinstance(name_scope, str) or not name_scope or name_scope.strip("/") != name_scope:
            raise ConfigError(
                f"ModelEma.name_scope is {name_scope!r}; it must be a prefix such as 'ema'."
            )
        self.decay = decay
        self.warmup = warmup
        self.average_buffers = average_buffers
        self.dtype = None if dtype is None else _DTYPES[dtype]
        self.validates = validate
        self._every_n_vals = every_n_vals
        self._name_scope = name_scope
        self._average: WeightAverage | None = None
        self._loaded: dict[str, Any] | None = None
        self._guard: StepGuard | None = None
        self._check: StepCheck | None = None
        self._overflows: list[Tensor] = []
        self._counts_on_device = False
        self._val: tuple[list[Loader], Any] | None = None

    @override
    def setup(self, trainer: Trainer) -> None:
        same = [one for one in trainer.get_callbacks(ModelEma) if one.name_scope == self.name_scope]
        if len([one for one in same if one.validates]) > 1:
            raise ConfigError(
                f"two ModelEma validate under the name {self.name_scope!r}, so nobody could tell "
                f"their metrics apart. Give one of them another name_scope, or validate: false."
            )

    # ---- the average

    def _begin(self, trainer: Trainer) -> None:
        """Begin with the weights as they are; or with what a checkpoint had."""
        backend = trainer.backend
        self._counts_on_device = backend.caps.static_shapes
        self._average = WeightAverage(
            trainer.model,
            self.decay,
            warms_up=self.warmup,
            averages_buffers=self.average_buffers,
            dtype=self.dtype,
            launches_cost=backend.device != torch.empty(0).device,
            part=backend.own_part,
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
            RuntimeError: If no training has begun.
        """
        if self._average is None:
            raise RuntimeError("ModelEma has no average before a fit, or a checkpoint with one.")
        return self._average

    def update(self) -> None:
        """Bring the weights as they are into the average, as a step does."""
        self.average.update()

    def set(self) -> None:
        """Make the average the weights as they are."""
        self.average.set()

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Have the model hold the averaged weights inside; restored in any case.

        Raises:
            RuntimeError: If there is no average, or it is inside already.
        """
        with self.average.swap():
            yield

    # ---- the step

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
        elif not any(map(is_lazy, model.parameters())):  # these have no values yet
            self._begin(trainer)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        if self._average is None:
            self._begin(trainer)
        if self._guard is not None:
            self._check = self._guard.check
        self._overflows = trainer.precision.overflows(optimizer)

    @override
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        if self._guard is not None and self._check is None:  # it comes after this one
            self._check = self._guard.check

    @override
    def on_before_optimizer_zero_grad(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        # Not before: buffers of a step that is left out have been put back by now.
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
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if self._loaded is not None:
            self._begin(trainer)
        elif "model" in state_dict:  # other weights, without an average
            self._average = None

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and their count."""
        if self._loaded is not None:
            return self._loaded
        return {} if self._average is None else self._average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what `state_dict` returned until the model is there."""
        self._loaded = dict(state) or None
