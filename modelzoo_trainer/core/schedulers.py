"""The schedulers: learning rate, weight decay."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, StateDict
from modelzoo_trainer.checkpointing.restoring import check_kinds, kinds
from modelzoo_trainer.core.scheduler_settings import (
    Beginning,
    Settings,
    changes,
    is_of_torch,
    kind_of,
    settings_in,
    settings_of,
)
from modelzoo_trainer.errors import CheckpointMismatch, ConfigError
from modelzoo_trainer.interceptors import Advised, event
from modelzoo_trainer.optim import Scheduler, check_conflicts

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.schedulers")

_KIND: Final = "scheduler_class"  # beside what the schedulers have in their state
_SETTINGS: Final = "scheduler_settings"


class SchedulersCallback(CoreCallback, Advised):
    """Owns `trainer.schedulers`; each is stepped once after every optimizer step.

    Args:
        schedulers: One or several of: a scheduler of torch's or ours, or a callable
            `optimizer -> scheduler`.

    A run that is resumed with other settings of a schedule goes on with these: at each step the
    value is what it would be had they held from the start. With torch's schedulers that is said
    in a warning. Classes derived from theirs take the settings of the checkpoint, with a warning.

    State: `schedulers`, a list of their state dicts, with their classes and settings.

    Raises:
        ConfigError: If one is neither, or a class; at set-up, if a callable returns no scheduler,
            one is made for another optimizer than the trainer's, the step of one needs a metric,
            or two of ours set the same value of the same parameter group.
    """

    def __init__(self, schedulers: Any = None) -> None:
        is_one = hasattr(schedulers, "step") or isinstance(schedulers, (str, Mapping))
        several = isinstance(schedulers, Iterable) and not is_one
        given = [] if schedulers is None else list(schedulers) if several else [schedulers]
        for idx, scheduler in enumerate(given):
            if isinstance(scheduler, type) and hasattr(scheduler, "step"):
                name = scheduler.__name__
                raise ConfigError(
                    f"schedulers[{idx}] is the class {name}. Pass a callable that makes one: "
                    f"lambda optimizer: {name}(optimizer, ...)."
                )
            if not hasattr(scheduler, "step") and not callable(scheduler):
                raise ConfigError(
                    f"schedulers[{idx}] is {scheduler!r}. Pass a scheduler with a step method, or "
                    f"a callable optimizer -> scheduler."
                )
        self._schedulers = given
        self._given: list[Settings | None] = []
        self._held: list[Settings | None] = []
        self._beginning: Beginning | None = None
        self._told = ""

    @event("create-scheduler")
    def create_scheduler(self, optimizer: Optimizer, scheduler: Any) -> Any:
        """Return a scheduler: the one that was given, or what the callable makes.

        Args:
            optimizer: Whose it is.
            scheduler: As it was given.
        """
        return scheduler if hasattr(scheduler, "step") else scheduler(optimizer)

    @override
    def setup(self, trainer: Trainer) -> None:
        trainer.schedulers = []
        if not trainer.has_optimizer:
            return
        for idx, scheduler in enumerate(self._schedulers):
            made = self.create_scheduler(trainer.optimizer, scheduler)
            if isinstance(made, Scheduler) and made.optimizer is None:
                made.bind(trainer.optimizer)
            _check_made(idx, made, trainer.optimizer)
            if isinstance(made, ReduceLROnPlateau):
                raise ConfigError(
                    f"schedulers[{idx}]: {type(made).__name__} needs a metric at each step, and "
                    f"schedulers are stepped without one. Use a schedule of the step, or step it "
                    f"in a callback of yours."
                )
            trainer.schedulers.append(made)
        check_conflicts([made for made in trainer.schedulers if isinstance(made, Scheduler)])
        self._given = [settings_of(made) for made in trainer.schedulers]
        self._held = list(self._given)
        self._beginning = Beginning(trainer.schedulers, trainer.optimizer)

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        states = trainer.backend.state_view(
            [plain_state(scheduler.state_dict()) for scheduler in trainer.schedulers]
        )
        for scheduler, state, settings in zip(trainer.schedulers, states, self._held, strict=True):
            if isinstance(state, dict):
                state |= {_KIND: kind_of(scheduler)}
                state |= {} if settings is None else {_SETTINGS: settings}
        state_dict["schedulers"] = states

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if "schedulers" not in state_dict or not trainer.has_optimizer:
            return
        states = [
            dict(state) if isinstance(state, Mapping) else state
            for state in state_dict["schedulers"]
        ]
        _check_kinds(trainer.schedulers, [_taken(state, _KIND) for state in states])
        found = [
            _settings_before(scheduler, state)
            for scheduler, state in zip(trainer.schedulers, states, strict=True)
        ]
        changed = [changes(*pair) for pair in zip(self._given, found, strict=True)]
        beginning = self._beginning if any(changed) else None
        replays = beginning is not None and beginning.is_known
        self._held = list(self._given) if replays else found
        replayed = []
        for scheduler, state in zip(trainer.schedulers, states, strict=True):
            if replays and isinstance(scheduler, LRScheduler):
                replayed.append(state)
            else:
                own = scheduler.state_dict()
                before = kinds(own)
                scheduler.load_state_dict(like_own(own, state))
                check_kinds(scheduler, before, scheduler.state_dict())
        if beginning is not None:
            if replays:
                beginning.go_to(replayed)
            self._tell(trainer.schedulers, changed, replays=replays)

    def _tell(self, schedulers: list[Any], changed: list[str], *, replays: bool) -> None:
        """Warn of settings that are not those of the checkpoint, once."""
        rows = "; ".join(
            f"schedulers[{idx}] ({type(scheduler).__name__}): {text}"
            for idx, (scheduler, text) in enumerate(zip(schedulers, changed, strict=True))
            if text
        )
        if rows == self._told:
            return
        self._told = rows
        if replays:
            log.warning(
                "%s. The settings given now hold: the schedule goes on as if they had held from "
                "step 0. Give those of the checkpoint to go on as before.",
                rows,
            )
        else:
            log.warning(
                "%s. The checkpoint's settings hold, as they are part of the scheduler's state. "
                "Write a load_state_dict for its class that keeps what it was given, if the new "
                "ones shall hold.",
                rows,
            )


def _check_made(idx: int, made: Any, optimizer: Optimizer) -> None:
    """Refuse what cannot be stepped, and a scheduler of an optimizer that is not stepped."""
    if isinstance(made, (type, Optimizer)) or not hasattr(made, "step"):
        raise ConfigError(
            f"schedulers[{idx}]: the callable returned {made!r}, which is not a scheduler. Return "
            f"one: lambda optimizer: StepLR(optimizer, step_size=100)."
        )
    missing = [name for name in ("state_dict", "load_state_dict") if not hasattr(made, name)]
    if missing:
        raise ConfigError(
            f"schedulers[{idx}]: {type(made).__name__} has no {' and no '.join(missing)}, and a "
            f"checkpoint must have its state. Define what is missing; state_dict may return {{}}."
        )
    own = getattr(made, "optimizer", None)
    if own is optimizer or not isinstance(own, Optimizer):
        return
    groups = {id(group) for group in optimizer.param_groups}  # wrappers share those of others
    if groups.isdisjoint(id(group) for group in own.param_groups):
        raise ConfigError(
            f"schedulers[{idx}]: {type(made).__name__} was made for another optimizer than the "
            f"trainer's, which it does not change. Pass schedulers=lambda optimizer: "
            f"{type(made).__name__}(optimizer, ...)."
        )


def _check_kinds(schedulers: list[Any], kinds: list[str | None]) -> None:
    """Compare the schedulers with the classes of a checkpoint's; the first formats have none."""
    advice = "Use those that it was made with, or load parts of it with LoadCheckpointStates."
    if len(kinds) != len(schedulers):
        raise CheckpointMismatch(
            f"schedulers: the checkpoint has {len(kinds)}, this run {len(schedulers)}. {advice}"
        )
    for idx, (scheduler, kind) in enumerate(zip(schedulers, kinds, strict=True)):
        own = kind_of(scheduler)
        if kind not in (None, own):
            raise CheckpointMismatch(
                f"schedulers[{idx}] is {own}, and the checkpoint's is {kind}, whose state is "
                f"another. {advice}"
            )


def _taken(state: Any, key: str) -> Any:
    """Take an entry out of a checkpoint's state; None if it has none."""
    return state.pop(key, None) if isinstance(state, dict) else None


def _settings_before(scheduler: Any, state: Any) -> Settings | None:
    """Take the settings out of a checkpoint's state; the first formats have those of torch's."""
    settings: Settings | None = _taken(state, _SETTINGS)
    if settings is None and is_of_torch(scheduler):
        return settings_in(like_own(scheduler.state_dict(), state))
    return settings


def plain_state(state: Any) -> Any:
    """Return a state with plain dicts: torch's `MultiStepLR` keeps its milestones in a `Counter`.

    A copy that fills a `Counter` with `update` would count them twice.
    """
    if isinstance(state, Mapping):
        return {key: plain_state(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain_state(value) for value in state]
    return state


def like_own(own: Any, state: Any) -> Any:
    """Return a state from a checkpoint with a `Counter` where `own` has one."""
    if isinstance(own, Counter) and isinstance(state, Mapping):
        return Counter(dict(state))
    if isinstance(own, Mapping) and isinstance(state, Mapping):
        return {key: like_own(own.get(key), value) for key, value in state.items()}
    if isinstance(own, list) and isinstance(state, list) and len(own) == len(state):
        return [like_own(mine, value) for mine, value in zip(own, state, strict=True)]
    return state
