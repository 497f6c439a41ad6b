"""Shorter validations."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from modelzoo_trainer.callback import Callback, Loader
from modelzoo_trainer.callbacks.step_based_evaluation import StepBasedEvaluation
from modelzoo_trainer.core.loop import ValidationLoop, require_count

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class LimitEvalSteps(Callback):
    """Ends validations after so many batches, where they would be longer.

    What is shorter is called what it was: metrics of the first batches only are less certain than
    those of all.

    Args:
        num_eval_steps: Batches of a validation, of all processes together, > 0.
        intermediate_only: Only those within a fit that are not its last one; with
            `StepBasedEvaluation`, only those that it has added. False = all, also outside a fit.

    Raises:
        ConfigError: If the number is not positive.
    """

    def __init__(self, num_eval_steps: int, intermediate_only: bool = True) -> None:
        require_count("LimitEvalSteps.num_eval_steps", num_eval_steps)
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
    """Have a validation end after so many batches at most.

    Args:
        loop: That of the validation.
        num_batches: Its batches.
        stack: Puts back what was there.
    """
    stack.callback(setattr, loop, "eval_steps", loop.eval_steps)
    loop.eval_steps = min(num_batches, loop.eval_steps or num_batches)
