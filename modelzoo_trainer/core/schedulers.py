"""The schedulers: learning rate, weight decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, StateDict
from modelzoo_trainer.errors import CheckpointMismatch, ConfigError
from modelzoo_trainer.optim import Scheduler, check_conflicts

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class SchedulersCallback(CoreCallback):
    """Owns `trainer.schedulers`; each is stepped once after every optimizer step.

    Args:
        schedulers: One or several of: a scheduler of torch's or ours, or a callable
            `optimizer -> scheduler`.

    State: `schedulers`, a list of their state dicts.

    Raises:
        ConfigError: If one is neither; at set-up, if two of ours set the same value of the same
            parameter group.
    """

    def __init__(self, schedulers: Any = None) -> None:
        several = isinstance(schedulers, Iterable) and not hasattr(schedulers, "step")
        given = [] if schedulers is None else list(schedulers) if several else [schedulers]
        for idx, scheduler in enumerate(given):
            if not hasattr(scheduler, "step") and not callable(scheduler):
                raise ConfigError(
                    f"schedulers[{idx}] is {scheduler!r}. Pass a scheduler with a step method, or "
                    f"a callable optimizer -> scheduler."
                )
        self._schedulers = given

    @override
    def setup(self, trainer: Trainer) -> None:
        trainer.schedulers = []
        if not trainer.has_optimizer:
            return
        for idx, scheduler in enumerate(self._schedulers):
            made = scheduler if hasattr(scheduler, "step") else scheduler(trainer.optimizer)
            if isinstance(made, Scheduler) and made.optimizer is None:
                made.bind(trainer.optimizer)
            if not hasattr(made, "step"):
                raise ConfigError(
                    f"schedulers[{idx}]: the callable returned {made!r}, which has no step method."
                )
            trainer.schedulers.append(made)
        check_conflicts([made for made in trainer.schedulers if isinstance(made, Scheduler)])

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        state_dict["schedulers"] = trainer.backend.host_state(
            [scheduler.state_dict() for scheduler in trainer.schedulers]
        )

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if "schedulers" not in state_dict:
            return
        states = state_dict["schedulers"]
        if len(states) != len(trainer.schedulers):
            raise CheckpointMismatch(
                f"the checkpoint has {len(states)} schedulers, this run {len(trainer.schedulers)}. "
                f"Use the schedulers that it was made with."
            )
        for scheduler, state in zip(trainer.schedulers, states, strict=True):
            scheduler.load_state_dict(state)
