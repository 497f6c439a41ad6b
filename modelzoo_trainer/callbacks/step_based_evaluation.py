"""Validations within training, under a name of their own."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Predicate
from typing_extensions import override

from modelzoo_trainer.callback import Callback, Loader
from modelzoo_trainer.constraints import PositiveInt, checked
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.schedule")

NamePart = Annotated[
    str, Predicate(lambda text: "/" not in text), "one part of a name, without '/'"
]


class StepBasedEvaluation(Callback):
    """Validates on every n-th step, besides the validations that the loop says.

    These are the loop's own validations at a higher `eval_frequency`, so all that holds of them
    does: the model trains on in the mode it was in, averages of training are not touched, a run
    that resumes catches up on one that was cut short. Those that the loop does not have on its own
    are told apart by a name scope: `validate_0/intermediate/loss`. The last one of a fit, and those
    that `loop.eval_frequency` asks for, keep their names. `LimitEvalSteps` makes the added ones
    shorter. Callbacks that run validations of their own count them as well, with their
    `every_n_vals`; but `ModelEma` counts, and follows, the loop's own validations only.

    Args:
        every_n_steps: How many optimizer steps lie between two of them, > 0. If
            `loop.eval_frequency` is a number of steps, it must be a multiple of this.
        name_scope: What is put before the names of metrics; "" = nothing.

    Raises:
        ConfigError: If an argument does not fit; when a fit begins, if the loop's frequency does
            not.
    """

    needs_trainer = True

    @checked()
    def __init__(self, every_n_steps: PositiveInt, name_scope: NamePart = "intermediate") -> None:
        self.every_n_steps = every_n_steps
        self.name_scope = name_scope
        self._own: int | None = None
        self._is_fitting = False

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        if val_dataloader is None:
            log.warning("StepBasedEvaluation: the fit has no val_dataloader to evaluate on.")
            return
        frequency = loop.eval_frequency
        self._own = self._checked(frequency)
        self._is_fitting = True
        stack.callback(setattr, self, "_is_fitting", False)
        stack.callback(setattr, loop, "eval_frequency", frequency)
        loop.eval_frequency = self.every_n_steps

    def _checked(self, frequency: int | float | str | None) -> int | None:
        """Return after how many steps the loop validates on its own; None = at the end at most."""
        if not frequency or (isinstance(frequency, float) and frequency == 1.0):
            return None
        if not isinstance(frequency, int) or frequency % self.every_n_steps:
            raise ConfigError(
                f"StepBasedEvaluation.every_n_steps is {self.every_n_steps}, and "
                f"loop.eval_frequency is {frequency!r}: it must be a multiple of that, or 1.0 (at "
                f"the end only), or None (null)."
            )
        return frequency

    def is_intermediate(self, trainer: Trainer) -> bool:
        """Return whether the validation at hand is one that the loop does not have on its own."""
        is_own = self._own is not None and trainer.global_step % self._own == 0
        return self._is_fitting and not is_own and trainer.schedule.has_steps_left(trainer)

    def own_idx(self, trainer: Trainer) -> int:
        """Return how many of the loop's own validations of the fit lie before the one at hand."""
        if self._own is None:
            return 0
        first = trainer.schedule.origin_step // self._own
        return -(-trainer.global_step // self._own) - first - 1

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        is_loops = loop is getattr(trainer.loop, "val_loop", None)
        if self.name_scope and is_loops and self.is_intermediate(trainer):
            stack.enter_context(trainer.name_scope(self.name_scope))
