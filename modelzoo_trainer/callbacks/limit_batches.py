"""Shorter epochs and validations."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from modelzoo_trainer.callback import Callback, Loader
from modelzoo_trainer.callbacks.step_based_evaluation import StepBasedEvaluation
from modelzoo_trainer.constraints import PositiveInt, checked
from modelzoo_trainer.core.loop import ValidationLoop
from modelzoo_trainer.devices import LIMIT_BATCHES, limit_batches
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class LimitEvalSteps(Callback):
    """Limits the number of batches of validations.

    What is shorter is called what it was: metrics of the first batches only are less certain than
    those of all.

    Args:
        num_eval_steps: Batches of a validation, of all processes together, > 0.
        intermediate_only: Only those within a fit that are not its last one; with
            `StepBasedEvaluation`, only those that it has added. False = all, also outside a fit.

    Raises:
        ConfigError: If the number is not positive.
    """

    @checked()
    def __init__(self, num_eval_steps: PositiveInt, intermediate_only: bool = True) -> None:
        self.num_eval_steps = num_eval_steps
        self.intermediate_only = intermediate_only

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        if not self.intermediate_only or self._is_intermediate(trainer, loop):
            shorten(loop, self.num_eval_steps, stack)

    def _is_intermediate(self, trainer: Trainer, loop: ValidationLoop) -> bool:
        if not trainer.is_fitting or loop is not getattr(trainer.loop, "val_loop", None):
            return False
        added = trainer.get_callback(StepBasedEvaluation)
        if added is None:
            return trainer.schedule.has_steps_left(trainer)
        return added.is_intermediate(trainer)


def shorten(loop: ValidationLoop, num_batches: int, stack: ExitStack) -> None:
    """Limit the number of batches of a validation."""
    stack.callback(setattr, loop, "eval_steps", loop.eval_steps)
    loop.eval_steps = min(num_batches, loop.eval_steps or num_batches)


log = logging.getLogger("modelzoo_trainer.data")


class LimitBatches(Callback):
    """Ends each epoch after a number of batches: of training, and of validations.

    The run's length, its schedules and its progress know of it. A run that resumes must have the
    same limit or a larger one than the current epoch has reached. Of several limits the smallest
    counts.

    It is a callback of a trainer; or all trainers have it inside `with LimitBatches(4):`, and those
    made there keep it; or all of a process, by the environment variable MODELZOO_LIMIT_BATCHES
    ("none" or empty = no limit).

    Args:
        num_batches: Batches of an epoch, of all processes together, > 0.

    Raises:
        ConfigError: If the number is not positive.
    """

    needs_trainer = True

    @checked()
    def __init__(self, num_batches: PositiveInt) -> None:
        self.num_batches = num_batches

    @override
    def setup(self, trainer: Trainer) -> None:
        is_own = any(known is self for known in trainer.callbacks.values())
        if id(self) in self._entered and not is_own:  # made inside `with`: it stays
            trainer.add_callback(self)

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        trainer.data.end_epochs_after(self.num_batches, "LimitBatches")

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        log.warning("LimitBatches: epochs end after %d batches.", self.num_batches)

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        shorten(loop, self.num_batches, stack)


def limit_of_environment() -> list[LimitBatches]:
    """Return the limit that the environment asks for, in a list; an empty one if it has none.

    Raises:
        ConfigError: If what it says is not a number.
    """
    try:
        num = limit_batches()
    except ValueError as error:
        raise ConfigError(f"{LIMIT_BATCHES}: {error}") from None
    return [] if num is None else [LimitBatches(num)]
