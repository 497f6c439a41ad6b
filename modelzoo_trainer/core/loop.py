"""The loop: how long to train, and how often to validate."""

from __future__ import annotations

import operator
import re
import sys
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from annotated_types import Predicate
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.base.constraints import (
    NonNegativeInt,
    PositiveInt,
    Seconds,
    checked,
    checked_dataclass,
)
from modelzoo_trainer.base.devices import Stream
from modelzoo_trainer.callback import Batch, CoreCallback, Outputs, StateDict
from modelzoo_trainer.checkpointing.restoring import whole_number
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class LoopCallback(CoreCallback):
    """Count optimizer steps.

    State: `global_step`.
    """

    @override
    def setup(self, trainer: Trainer) -> None:
        trainer.global_step = 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.grad_accum.should_run_optimizer_step:
            trainer.global_step += 1

    def show_step(self, trainer: Trainer, step: int) -> int:
        """Set `trainer.global_step` during a deferred delivery; return the previous one."""
        before, trainer.global_step = trainer.global_step, step
        return before

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        state_dict["global_step"] = trainer.global_step

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        trainer.global_step = whole_number(state_dict, "global_step", trainer.global_step)


_TIME: Final = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", re.ASCII)


def _seconds(time: str) -> int:
    """Convert days, hours, minutes and seconds to seconds; 0 if invalid."""
    found = _TIME.fullmatch(time)
    days, hours, minutes, rest = (int(part or 0) for part in found.groups()) if found else [0] * 4
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


Time = Annotated[
    str,
    Predicate(lambda time: 0 < _seconds(time) <= sys.float_info.max),
    "a time such as '11:30:00' or '1-11:30:00' (days, hours, minutes, seconds)",
]
Frequency = Annotated[
    float,
    Predicate(lambda value: 0 <= value <= 1 or (value > 1 and value.is_integer())),  # as 1e3
    "a fraction of the run in [0, 1]",
]


EPOCH: Final = "epoch"
"""The `eval_frequency` that validates at the end of each epoch."""


def _frequency(given: float | Literal["epoch"]) -> int | float | Literal["epoch"]:
    """Return a number of steps as an int, and a fraction of the run as a float."""
    if given == EPOCH:
        return EPOCH
    try:
        return operator.index(given)  # type: ignore[arg-type]  # may be a numpy integer
    except TypeError:
        return int(given) if given > 1 else float(given)


class ValidationLoop(LoopCallback):
    """Validate for a number of batches.

    Args:
        eval_steps: Batches, > 0; None = all of the dataloader.
        hook: Names the six hooks: `on_{hook}_{start,end}`,
            `on_{hook}_batch_{start,end}`, `on_{hook}_step_{start,end}`.

    Raises:
        ConfigError: If `eval_steps` is not positive.
    """

    needs_all_batches: ClassVar[bool] = False
    """Whether callbacks must not limit the number of batches."""

    @checked()
    def __init__(self, eval_steps: PositiveInt | None = None, hook: str = "validate") -> None:
        self.eval_steps = eval_steps
        self.hook = hook
        self.on_start_hook = f"on_{hook}_start"
        self.on_end_hook = f"on_{hook}_end"
        self.on_batch_start_hook = f"on_{hook}_batch_start"
        self.on_batch_end_hook = f"on_{hook}_batch_end"
        self.on_step_start_hook = f"on_{hook}_step_start"
        self.on_step_end_hook = f"on_{hook}_step_end"

    def step(self, trainer: Trainer, batch: Batch, batch_idx: int) -> Outputs:
        """Return what the model computes of a batch; a subclass may compute something else."""
        with trainer.backend.step(batch_idx, Stream.VALIDATE):
            trainer.call(self.on_step_start_hook, trainer.model, batch)
            outputs = trainer.forward(batch)
            trainer.call(self.on_step_end_hook, trainer.model, outputs, batch)
        return outputs


@checked_dataclass(owner="loop")
class TrainingLoop(LoopCallback):
    """Set how long to train and when to validate. A step is one update of the parameters.

    Args:
        num_steps: Train this many more steps; excludes `num_epochs`, overrides `max_steps`. An
            interrupted run that is started again takes the remaining ones, a finished run all of
            them again.
        max_steps: Train until `global_step` is this, including steps before a restart.
        num_epochs: Train this many epochs, including those before a restart. Default if none of
            the three is given: one.
        steps_per_epoch: Maximum steps per epoch; None = no limit.
        eval_frequency: Validate on every n-th step (int), after each fraction of the run (float in
            (0, 1]; 1.0 = once, at the end), or at the end of each epoch ("epoch"); always also at
            the end. None or 0 = never.
        eval_steps: Batches per validation; None = all.
        grad_accum_steps: Batches per step.
        max_time: Stop gracefully at the first step boundary after this time, to be resumed later:
            seconds, "HH:MM:SS" or "D-HH:MM:SS". None = no limit. Leave time for a step, a batch of
            a validation and a checkpoint before the limit of a job. Restarts by `autorestart` do
            not reset it.

    Raises:
        ConfigError: If a number or time is invalid, or both `num_steps` and `num_epochs` are given.
    """

    num_steps: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    num_epochs: PositiveInt | None = None
    steps_per_epoch: PositiveInt | None = None
    eval_frequency: NonNegativeInt | Frequency | Literal["epoch"] | None = 1.0
    eval_steps: PositiveInt | None = None
    grad_accum_steps: PositiveInt = 1
    max_time: Time | Seconds | None = None

    def __post_init__(self) -> None:
        if self.num_steps is not None and self.num_epochs is not None:
            raise ConfigError(
                f"loop: set either num_steps or num_epochs, not both; got "
                f"num_steps={self.num_steps} and num_epochs={self.num_epochs}."
            )
        if self.num_steps is self.max_steps is self.num_epochs is None:
            self.num_epochs = 1
        if self.eval_frequency is not None:
            self.eval_frequency = _frequency(self.eval_frequency)
        time = self.max_time
        self.max_time_s = _seconds(time) if isinstance(time, str) else time
        self.val_loop = ValidationLoop(eval_steps=self.eval_steps)


def require_training_loop(loop: LoopCallback) -> TrainingLoop:
    """Check that a trainer's loop is a `TrainingLoop`, and return it.

    Raises:
        ConfigError: If it is not.
    """
    if not isinstance(loop, TrainingLoop):
        raise ConfigError(
            f"fit requires a TrainingLoop, but the trainer has a {type(loop).__name__}. "
            f"Pass Trainer(loop=TrainingLoop(...))."
        )
    return loop


def validation_loop_of(own: LoopCallback, given: ValidationLoop | None) -> ValidationLoop:
    """Return the loop of a validation: the given one, or the trainer's.

    Raises:
        ConfigError: If it is not a `ValidationLoop`.
    """
    loop = given or (own.val_loop if isinstance(own, TrainingLoop) else own)
    if not isinstance(loop, ValidationLoop):
        raise ConfigError(f"validate requires a ValidationLoop, got a {type(loop).__name__}.")
    return loop
