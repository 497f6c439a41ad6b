"""The schedulers of the learning rate and other settings."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, StateDict
from modelzoo_trainer.checkpointing.restoring import check_kinds, kinds
from modelzoo_trainer.core.parts.scheduler_settings import (
    Beginning,
    Settings,
    changes,
    is_of_torch,
    kind_of,
    settings_in,
    settings_of,
)
from modelzoo_trainer.errors import (
    OF_ANOTHER_RUN,
    ONLY_MODEL,
    CheckpointMismatch,
    ConfigError,
    suggest,
)
from modelzoo_trainer.hooks.interceptors import Interceptable, event
from modelzoo_trainer.optim import Scheduler, check_conflicts

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.schedulers")

_REL_TOL: Final = 1e-6  # rounding may differ between formulas
_ABS_TOL: Final = 1e-12
_KIND: Final = "scheduler_class"  # keys beside those of the scheduler
_SETTINGS: Final = "scheduler_settings"


class SchedulersCallback(CoreCallback, Interceptable):
    """Own `trainer.schedulers`; each is stepped once after every optimizer step.

    Args:
        schedulers: One or several schedulers of torch or of this package, or callables
            `optimizer -> scheduler`. For several optimizers: a mapping of their names to these;
            each scheduler is stepped after its optimizer.

    A run resumed with other settings of a schedule uses the new ones, as if they had applied from
    the start, with a warning; for schedulers of this package if the value at the resumed step
    differs. Classes derived from torch's use the settings of the checkpoint, with a warning.

    State: `schedulers`, a list of their state dicts, with their classes and settings.

    Raises:
        ConfigError: If one is invalid, or a class; at set-up, if a callable does not return a
            scheduler, one belongs to another optimizer, one requires a metric, or two of this
            package set the same value of the same parameter group.
    """

    def __init__(self, schedulers: Any = None) -> None:
        self._by_name = isinstance(schedulers, Mapping)
        given = schedulers if isinstance(schedulers, Mapping) else {None: schedulers}
        self._schedulers = {name: _checked(name, one) for name, one in given.items()}
        self._given: list[Settings | None] = []
        self._held: list[Settings | None] = []
        self._beginning: Beginning | None = None
        self._reported = ""
        self._reported_values = ""

    @event("create-scheduler")
    def create_scheduler(self, optimizer: Optimizer, scheduler: Any) -> Any:
        """Return the given scheduler, or the result of the callable."""
        return scheduler if hasattr(scheduler, "step") else scheduler(optimizer)

    @override
    def setup(self, trainer: Trainer) -> None:
        trainer.schedulers = []
        if not trainer.has_optimizer:
            return
        for name, optimizer in self._optimizers(trainer):
            made = [
                self._make(_label(name, idx), optimizer, scheduler)
                for idx, scheduler in enumerate(self._schedulers.get(name, ()))
            ]
            check_conflicts([one for one in made if isinstance(one, Scheduler)])
            trainer.schedulers += made
            if trainer.manual_steps is not None and name is not None:
                trainer.manual_steps.schedulers[name] = made
        self._given = [settings_of(made) for made in trainer.schedulers]
        self._held = list(self._given)
        self._beginning = Beginning(trainer.schedulers, trainer.optimizers.values())

    def _optimizers(self, trainer: Trainer) -> list[tuple[str | None, Optimizer]]:
        """Return the optimizers with their keys in `schedulers`, in order of the state."""
        known = trainer.optimizers
        if trainer.manual_steps is None:
            if self._by_name:
                raise ConfigError(
                    f"schedulers is a dict ({', '.join(map(repr, self._schedulers))}), which "
                    f"requires a dict of optimizers, but the trainer has one optimizer. Pass a "
                    f"scheduler, or a list of schedulers."
                )
            return [(None, trainer.optimizer)]
        if not self._by_name and self._schedulers[None]:
            raise ConfigError(
                f"The trainer has several optimizers ({', '.join(known)}), so schedulers must be "
                f"a dict with these names as keys, and a scheduler or a list of schedulers as "
                f"values."
            )
        for name in self._schedulers.keys() - {None}:
            if name not in known:
                raise ConfigError(
                    f"schedulers: there is no optimizer {name!r}. {suggest(str(name), known)}"
                )
        return [(name, known[name]) for name in sorted(known)]

    def _make(self, label: str, optimizer: Optimizer, scheduler: Any) -> Any:
        made = self.create_scheduler(optimizer, scheduler)
        if isinstance(made, Scheduler) and made.optimizer is None:
            made.bind(optimizer)
        _check_made(label, made, optimizer)
        if isinstance(made, ReduceLROnPlateau):
            raise ConfigError(
                f"{label}: {type(made).__name__} requires a metric at each step, but the trainer "
                f"calls step() without one. Use another scheduler, or create it in a custom "
                f"callback that calls its step(metric)."
            )
        return made

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
        before_load = self._values(trainer, state_dict)
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
            self._warn_of_changes(trainer.schedulers, changed, replays=replays)
        if before_load is not None:
            self._warn_of_values(trainer, before_load, state_dict.get("global_step"))

    def _values(self, trainer: Trainer, state_dict: StateDict) -> list[list[float]] | None:
        """Return what the schedules of this package set in each group, as the checkpoint has it.

        None if the optimizer is not restored, or no fit begins.
        """
        is_restored = "optimizer" in state_dict or "optimizers" in state_dict
        if not (is_restored and trainer.is_resuming and trainer.backend.caps.holds_values):
            return None
        return [_values_of(scheduler) for scheduler in trainer.schedulers]

    def _warn_of_values(
        self, trainer: Trainer, before: list[list[float]], step: int | None
    ) -> None:
        """Warn about schedules whose value at this step differs from the checkpoint's, once."""
        rows = "; ".join(
            f"schedulers[{idx}] ({type(scheduler).__name__}): {scheduler.param_group_key} is "
            f"{new:.6g} at step {step} (checkpoint: {old:.6g})"
            for idx, (scheduler, values) in enumerate(zip(trainer.schedulers, before, strict=True))
            for old, new in _first_change(values, _values_of(scheduler))
        )
        if rows and rows != self._reported_values:
            log.warning(
                "%s. Using the value of the schedule: its settings have changed, and are used as "
                "if they had been set from step 0; or something else had changed the value.",
                rows,
            )
        self._reported_values = rows

    def _warn_of_changes(self, schedulers: list[Any], changed: list[str], *, replays: bool) -> None:
        """Warn about settings that differ from the checkpoint's, once."""
        rows = "; ".join(
            f"schedulers[{idx}] ({type(scheduler).__name__}): {text}"
            for idx, (scheduler, text) in enumerate(zip(schedulers, changed, strict=True))
            if text
        )
        if rows == self._reported:
            return
        self._reported = rows
        if replays:
            log.warning(
                "%s. Using the new settings, as if they had been set from step 0. To continue as "
                "before, pass the settings of the checkpoint.",
                rows,
            )
        else:
            log.warning(
                "%s. Using the checkpoint's settings. To use the new ones, override "
                "load_state_dict of the scheduler so that it keeps them.",
                rows,
            )


def _values_of(scheduler: Any) -> list[float]:
    """Return the values of parameter groups that a schedule of this package sets, else nothing."""
    return scheduler.current_values() if isinstance(scheduler, Scheduler) else []


def _first_change(before: list[float], now: list[float]) -> list[tuple[float, float]]:
    """Return the first pair of values that differ by more than rounding, if any."""
    pairs = zip(before, now, strict=True)
    return [pair for pair in pairs if not math.isclose(*pair, rel_tol=_REL_TOL, abs_tol=_ABS_TOL)][
        :1
    ]


def _label(name: str | None, idx: int) -> str:
    """Return the name of a scheduler in messages."""
    return f"schedulers[{idx}]" if name is None else f"schedulers[{name!r}][{idx}]"


def _checked(name: str | None, schedulers: Any) -> list[Any]:
    """Check the schedulers of one optimizer and return them as a list.

    Raises:
        ConfigError: If one is neither a scheduler nor a callable, or a class.
    """
    is_one = hasattr(schedulers, "step") or isinstance(schedulers, (str, Mapping))
    several = isinstance(schedulers, Iterable) and not is_one
    given = [] if schedulers is None else list(schedulers) if several else [schedulers]
    for idx, scheduler in enumerate(given):
        if isinstance(scheduler, type) and hasattr(scheduler, "step"):
            kind = scheduler.__name__
            raise ConfigError(
                f"{_label(name, idx)} is the class {kind}. Pass a callable that creates one: "
                f"lambda optimizer: {kind}(optimizer, ...)."
            )
        if not hasattr(scheduler, "step") and not callable(scheduler):
            raise ConfigError(
                f"{_label(name, idx)} is {scheduler!r}. Pass a scheduler with a step method, or "
                f"a callable optimizer -> scheduler."
            )
    return given


def _check_made(label: str, made: Any, optimizer: Optimizer) -> None:
    """Check that a scheduler can be stepped and saved, and belongs to the optimizer."""
    if isinstance(made, (type, Optimizer)) or not hasattr(made, "step"):
        raise ConfigError(
            f"{label}: the callable returned {made!r}, which is not a scheduler. Return "
            f"one: lambda optimizer: StepLR(optimizer, step_size=100)."
        )
    missing = [name for name in ("state_dict", "load_state_dict") if not hasattr(made, name)]
    if missing:
        raise ConfigError(
            f"{label}: {type(made).__name__} has no {' and no '.join(missing)}, which "
            f"checkpoints require. Define what is missing; state_dict may return {{}}."
        )
    own = getattr(made, "optimizer", None)
    if own is optimizer or not isinstance(own, Optimizer):
        return
    groups = {id(group) for group in optimizer.param_groups}  # wrappers share those of others
    if groups.isdisjoint(id(group) for group in own.param_groups):
        raise ConfigError(
            f"{label}: {type(made).__name__} was created for another optimizer than the "
            f"trainer's. Pass schedulers=lambda optimizer: {type(made).__name__}(optimizer, ...)."
        )


def _check_kinds(schedulers: list[Any], kinds: list[str | None]) -> None:
    """Compare the classes of schedulers with a checkpoint's, if it has them."""
    advice = f"Use the original ones. {OF_ANOTHER_RUN} {ONLY_MODEL}"
    if len(kinds) != len(schedulers):
        raise CheckpointMismatch(
            f"schedulers: the checkpoint has {len(kinds)}, but this run has {len(schedulers)}. "
            f"{advice}"
        )
    for idx, (scheduler, kind) in enumerate(zip(schedulers, kinds, strict=True)):
        own = kind_of(scheduler)
        if kind not in (None, own):
            raise CheckpointMismatch(
                f"schedulers[{idx}] is {own}, but the checkpoint has the state of {kind}. {advice}"
            )


def _taken(state: Any, key: str) -> Any:
    """Pop an entry of a checkpoint's state; None if missing."""
    return state.pop(key, None) if isinstance(state, dict) else None


def _settings_before(scheduler: Any, state: Any) -> Settings | None:
    """Pop the settings of a checkpoint's state, or derive them from the state of torch's."""
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
