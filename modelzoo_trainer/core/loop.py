"""How long to train and how much to validate."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Final

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, CoreCallback, Outputs, StateDict
from modelzoo_trainer.checkpointing.restoring import whole_number
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class LoopCallback(CoreCallback):
    """Counts optimizer steps.

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

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        state_dict["global_step"] = trainer.global_step

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        trainer.global_step = whole_number(state_dict, "global_step", trainer.global_step)


class ValidationLoop(LoopCallback):
    """One pass of validation.

    Args:
        eval_steps: Batches of it, > 0; None = all of the dataloader.
        hook: Names the six hooks that are called: `on_{hook}_{start,end}`,
            `on_{hook}_batch_{start,end}`, `on_{hook}_step_{start,end}`.

    Raises:
        ConfigError: If `eval_steps` is not positive.
    """

    def __init__(self, eval_steps: int | None = None, hook: str = "validate") -> None:
        require_positive("eval_steps", eval_steps)
        self.eval_steps = eval_steps
        self.hook = hook
        self.on_start_hook = f"on_{hook}_start"
        self.on_end_hook = f"on_{hook}_end"
        self.on_batch_start_hook = f"on_{hook}_batch_start"
        self.on_batch_end_hook = f"on_{hook}_batch_end"
        self.on_step_start_hook = f"on_{hook}_step_start"
        self.on_step_end_hook = f"on_{hook}_step_end"


class TrainingLoop(LoopCallback):
    """How long to train, and when to validate. A step is one update of the parameters.

    Args:
        num_steps: Train this many more steps; excludes `num_epochs`, goes before `max_steps`. A
            run that was cut off and is started again takes those that are left, one that has
            finished takes all of them again.
        max_steps: Train until `global_step` is this, steps before a restart counted.
        num_epochs: Train this many passes over the data, those before a restart counted. With
            none of the three: one.
        steps_per_epoch: End a pass after this many steps; None = with the data.
        eval_frequency: Validate every so many steps (int), or after each such fraction of the
            run (float in (0, 1]; 1.0 = once, at the end); None or 0 = never. Always also at
            the end.
        eval_steps: Batches of a validation; None = all.
        grad_accum_steps: Batches per step.
        max_time: End a fit, in order and to be resumed, at the first step boundary after this
            time: seconds, or "HH:MM:SS" or "D-HH:MM:SS". None = no limit. Of a job that has a
            limit, leave the time that a step, a validation's batch and a checkpoint take.
            Restarts by `autorestart` do not begin it anew.

    Raises:
        ConfigError: If a number is not positive, a time is none, or both `num_steps` and
            `num_epochs` are given.
    """

    def __init__(  # noqa: PLR0913  # the YAML section's keys
        self,
        num_steps: int | None = None,
        max_steps: int | None = None,
        num_epochs: int | None = None,
        steps_per_epoch: int | None = None,
        eval_frequency: int | float | None = 1.0,
        eval_steps: int | None = None,
        grad_accum_steps: int = 1,
        max_time: str | float | None = None,
    ) -> None:
        require_positive("loop.num_steps", num_steps)
        require_positive("loop.max_steps", max_steps)
        require_positive("loop.num_epochs", num_epochs)
        require_positive("loop.steps_per_epoch", steps_per_epoch)
        require_positive("loop.eval_steps", eval_steps)
        require_positive("loop.grad_accum_steps", grad_accum_steps)
        if num_steps is not None and num_epochs is not None:
            raise ConfigError(
                f"loop: num_steps ({num_steps}) and num_epochs ({num_epochs}) are both given; "
                f"they exclude each other."
            )
        if isinstance(eval_frequency, float) and eval_frequency > 1 and eval_frequency.is_integer():
            eval_frequency = int(eval_frequency)  # 1e3 in a file
        _check_frequency(eval_frequency)
        if num_steps is None and max_steps is None and num_epochs is None:
            num_epochs = 1
        self.num_steps = num_steps
        self.max_steps = max_steps
        self.num_epochs = num_epochs
        self.steps_per_epoch = steps_per_epoch
        self.eval_frequency = eval_frequency
        self.eval_steps = eval_steps
        self.grad_accum_steps = grad_accum_steps
        self.max_time = max_time
        self.max_time_s = _seconds(max_time)
        self.val_loop = ValidationLoop(eval_steps=eval_steps)


_TIME: Final = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", re.ASCII)


def _seconds(max_time: str | float | None) -> float | None:
    """Return a time in seconds."""
    if max_time is None:
        return None
    seconds: float | None = None
    if isinstance(max_time, str):
        found = _TIME.fullmatch(max_time)
        if found is not None:
            days, hours, minutes, rest = (int(part or 0) for part in found.groups())
            seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    elif not isinstance(max_time, bool) and isinstance(max_time, (int, float)):
        seconds = max_time
    if seconds is None or not 0 < seconds <= sys.float_info.max:
        raise ConfigError(
            f"loop.max_time is {max_time!r}; it must be a number of seconds > 0, or a time such "
            f"as '11:30:00' or '1-11:30:00' (days, hours, minutes, seconds)."
        )
    return seconds


def require_positive(name: str, value: int | None) -> None:
    """Raise a `ConfigError` unless a count is None or a whole number > 0."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number > 0.")


def require_count(name: str, value: int, most: int | None = None) -> None:
    """Raise a `ConfigError` unless a value is a whole number > 0, and not above `most`."""
    if value is None:
        raise ConfigError(f"{name} is None; it must be a whole number > 0.")
    require_positive(name, value)
    if most is not None and value > most:
        raise ConfigError(f"{name} is {value}; it must be at most {most}.")


def _check_frequency(value: int | float | None) -> None:
    if value is None or value == 0:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not value > 0 or (isinstance(value, float) and value > 1):
        raise ConfigError(
            f"loop.eval_frequency is {value!r}; it must be a whole number of steps, a fraction "
            f"of the run in (0.0, 1.0], or None (null)."
        )
