"""The schedulers: learning rate, weight decay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
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
        ConfigError: If one is neither; at set-up, if the step of one needs a metric, or two of
            ours set the same value of the same parameter group.
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
            if isinstance(made, ReduceLROnPlateau):
                raise ConfigError(
                    f"schedulers[{idx}]: {type(made).__name__} needs a metric at each step, and "
                    f"schedulers are stepped without one. Use a schedule of the step, or step it "
                    f"in a callback of yours."
                )
            trainer.schedulers.append(made)
        check_conflicts([made for made in trainer.schedulers if isinstance(made, Scheduler)])

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        state_dict["schedulers"] = trainer.backend.state_view(
            [_plain(scheduler.state_dict()) for scheduler in trainer.schedulers]
        )

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if "schedulers" not in state_dict or not trainer.has_optimizer:
            return
        states = state_dict["schedulers"]
        if len(states) != len(trainer.schedulers):
            raise CheckpointMismatch(
                f"the checkpoint has {len(states)} schedulers, this run {len(trainer.schedulers)}. "
                f"Use the schedulers that it was made with."
            )
        for scheduler, state in zip(trainer.schedulers, states, strict=True):
            scheduler.load_state_dict(_like(scheduler.state_dict(), state))


def _plain(state: Any) -> Any:
    """Return a state with plain dicts: torch's `MultiStepLR` keeps its milestones in a `Counter`.

    A copy that fills a `Counter` with `update` would count them twice.
    """
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_plain(value) for value in state]
    return state


def _like(own: Any, state: Any) -> Any:
    """Return a state from a checkpoint with a `Counter` where `own` has one."""
    if isinstance(own, Counter) and isinstance(state, Mapping):
        return Counter(dict(state))
    if isinstance(own, Mapping) and isinstance(state, Mapping):
        return {key: _like(own.get(key), value) for key, value in state.items()}
    if isinstance(own, list) and isinstance(state, list) and len(own) == len(state):
        return [_like(mine, value) for mine, value in zip(own, state, strict=True)]
    return state
