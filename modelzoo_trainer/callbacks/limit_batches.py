"""Limits on the number of batches of epochs and validations."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from modelzoo_trainer.base.constraints import PositiveInt, checked_dataclass
from modelzoo_trainer.base.devices import LIMIT_BATCHES, limit_batches
from modelzoo_trainer.callback import Callback, Loader
from modelzoo_trainer.callbacks.step_based_evaluation import StepBasedEvaluation
from modelzoo_trainer.core.loop import ValidationLoop
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


@checked_dataclass
class LimitEvalSteps(Callback):
    """Limit the number of batches per validation.

    Metric names stay the same, though their values come from fewer batches. `EleutherEvalHarness`
    is not affected: set `limit` of its `eeh_args`.

    Args:
        num_eval_steps: Batches per validation, over all processes, > 0.
        intermediate_only: Whether to limit only validations within a fit except its last; with
            `StepBasedEvaluation`, only those that it adds. False = all, also outside `fit`.

    Raises:
        ConfigError: If the number is not positive.
    """

    num_eval_steps: PositiveInt
    intermediate_only: bool = True

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
    """Limit the batches of a validation that can do with fewer, until the stack is closed."""
    if loop.needs_all_batches:
        return
    stack.callback(setattr, loop, "eval_steps", loop.eval_steps)
    loop.eval_steps = min(num_batches, loop.eval_steps or num_batches)


log = logging.getLogger("modelzoo_trainer.data")


@checked_dataclass
class LimitBatches(Callback):
    """Limit the number of batches per epoch and per validation, for example for a smoke test.

    The length of the run, its schedules and its progress take the limit into account.
    `EleutherEvalHarness` evaluates `num_batches * batch_size` documents of each task. A resumed run
    requires the same limit, or one larger than the position in its current epoch. The smallest of
    several limits applies.

    Use it as a callback of a trainer; as a context manager, `with LimitBatches(4):`, for all
    trainers inside (those created there keep it); or set the environment variable
    MODELZOO_LIMIT_BATCHES for the whole process ("none" or empty = no limit).

    Args:
        num_batches: Batches per epoch, over all processes, > 0.

    Raises:
        ConfigError: If the number is not positive.
    """

    needs_trainer = True

    num_batches: PositiveInt

    @override
    def setup(self, trainer: Trainer) -> None:
        is_own = any(known is self for known in trainer.callbacks.values())
        if id(self) in self._entered and not is_own:  # created inside `with`: keep the limit
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
        log.warning(
            "LimitBatches: each epoch and validation is limited to num_batches=%d.",
            self.num_batches,
        )

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        shorten(loop, self.num_batches, stack)


def limit_of_environment() -> list[LimitBatches]:
    """Return the limit of the environment variable in a list, which is empty if there is none.

    Raises:
        ConfigError: If its value is not a number.
    """
    try:
        num = limit_batches()
    except ValueError as error:
        raise ConfigError(f"{LIMIT_BATCHES}: {error}") from None
    return [] if num is None else [LimitBatches(num)]
