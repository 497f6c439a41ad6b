"""Short passes over data, to try a configuration out."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from modelzoo_trainer.callback import Callback, Loader
from modelzoo_trainer.callbacks.limit_eval_steps import shorten
from modelzoo_trainer.core.loop import require_count
from modelzoo_trainer.devices import LIMIT_BATCHES, limit_batches
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.data")


class LimitBatches(Callback):
    """Ends each pass over data after so many batches: of training, and of validations.

    The run's length, its schedules and its progress know of it. A run that resumes has to have the
    same limit or a larger one than the pass at hand has got to. Of several limits the least counts.

    It is a callback of a trainer; or all trainers have it inside `with LimitBatches(4):`, and those
    made there keep it; or all of a process, by the environment variable MODELZOO_LIMIT_BATCHES
    ("none" or empty = no limit).

    Args:
        num_batches: Batches of a pass, of all processes together, > 0.

    Raises:
        ConfigError: If the number is not positive.
    """

    needs_trainer = True

    def __init__(self, num_batches: int) -> None:
        require_count("LimitBatches.num_batches", num_batches)
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
        trainer.data.end_passes_after(self.num_batches, "LimitBatches")

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        log.warning("LimitBatches: passes over data end after %d batches.", self.num_batches)

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        shorten(loop, self.num_batches, stack)


def limit_of_environment() -> list[LimitBatches]:
    """Return the limit that the environment asks for, in a list; an empty one if it has none.

    Raises:
        ConfigError: If what it says is no number.
    """
    try:
        num = limit_batches()
    except ValueError as error:
        raise ConfigError(f"{LIMIT_BATCHES}: {error}") from None
    return [] if num is None else [LimitBatches(num)]
