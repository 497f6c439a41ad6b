"""Additional validations within training, in a separate name scope."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Predicate
from typing_extensions import override

from modelzoo_trainer.base.constraints import PositiveInt, checked
from modelzoo_trainer.callback import Callback, Loader
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.schedule")

NamePart = Annotated[
    str, Predicate(lambda text: "/" not in text), "one part of a name, without '/'"
]


class StepBasedEvaluation(Callback):
    """Validate on every n-th step, in addition to the validations of `loop.eval_frequency`.

    These are ordinary validations of the loop at a higher frequency: a resumed run repeats one that
    was interrupted, and training averages are not affected. The metrics of the additional ones have
    a name scope: `validate_0/intermediate/loss`. The last validation of a fit, and validations by
    `loop.eval_frequency`, keep their names. `LimitEvalSteps` can shorten the additional ones.
    Custom validations count them in `every_n_vals`; `ModelEma` does not, and never follows them.

    Args:
        every_n_steps: Number of optimizer steps between two validations, > 0. If
            `loop.eval_frequency` is a number of steps, it must be a multiple of this.
        name_scope: Name scope of the metrics; "" = none.

    Raises:
        ConfigError: If an argument is invalid; at the start of a fit, if `loop.eval_frequency` is
            not a multiple.
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
            log.warning(
                "StepBasedEvaluation: the fit has no val_dataloader, so nothing is validated."
            )
            return
        frequency = loop.eval_frequency
        self._own = self._checked(frequency)
        self._is_fitting = True
        stack.callback(setattr, self, "_is_fitting", False)
        stack.callback(setattr, loop, "eval_frequency", frequency)
        loop.eval_frequency = self.every_n_steps

    def _checked(self, frequency: int | float | str | None) -> int | None:
        """Return the interval of the loop's own validations in steps; None = at the end at most."""
        if not frequency or (isinstance(frequency, float) and frequency == 1.0):
            return None
        if not isinstance(frequency, int) or frequency % self.every_n_steps:
            raise ConfigError(
                f"StepBasedEvaluation.every_n_steps is {self.every_n_steps}, but "
                f"loop.eval_frequency is {frequency!r}. Set eval_frequency to a multiple of "
                f"every_n_steps, to 1.0 (only at the end), or to None (null)."
            )
        return frequency

    def is_intermediate(self, trainer: Trainer) -> bool:
        """Return whether the current validation is an additional one."""
        is_own = self._own is not None and trainer.global_step % self._own == 0
        return self._is_fitting and not is_own and trainer.schedule.has_steps_left(trainer)

    def own_idx(self, trainer: Trainer) -> int:
        """Return the number of the loop's own validations in the fit before the current one."""
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
