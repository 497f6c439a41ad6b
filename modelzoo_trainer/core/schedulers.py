"""The schedulers of the learning rate and other settings."""

from __future__ import annotations

import copy
import logging
import reprlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, StateDict
from modelzoo_trainer.checkpointing.restoring import check_kinds, kinds
from modelzoo_trainer.core.optimizer_facts import is_plain
from modelzoo_trainer.errors import CheckpointMismatch, ConfigError, suggest
from modelzoo_trainer.interceptors import Interceptable, event
from modelzoo_trainer.optim import Scheduler, check_conflicts

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

Settings = dict[str, Any]

_PROGRESS: Final = frozenset(
    ("last_epoch", "_step_count", "_last_lr", "_is_initial", "T_cur", "T_i")
)
_IN_GROUPS: Final = ("max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
_CYCLED: Final = ("momentum", "betas")


def kind_of(scheduler: Any) -> str:
    """Return the name of a scheduler's class, with its members in parentheses."""
    name = type(scheduler).__name__
    members = ", ".join(map(kind_of, _members_of(scheduler)))
    return f"{name}({members})" if members else name


def settings_of(scheduler: Any) -> Settings | None:
    """Return the settings of a new torch scheduler by name.

    None for others, and for one that has already stepped, whose values may differ.
    """
    if not isinstance(scheduler, LRScheduler):
        return None
    state = scheduler.state_dict()
    if _steps_of(state) != 0:
        return None
    settings = settings_in(state)
    for idx, group in enumerate(_optimizer_of(scheduler).param_groups):
        held = {key: group[key] for key in _IN_GROUPS if type(group.get(key)) in (int, float)}
        settings |= {f"param_groups[{idx}].{key}": value for key, value in held.items()}
    return settings


def settings_in(state: Mapping[str, Any]) -> Settings:
    """Return the plain values of a state that are constant between steps, by name."""
    return dict(_flat("", state))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Counter):
        yield name, sorted(value.elements())
    elif isinstance(value, Mapping):
        for key in value.keys() - _PROGRESS:
            yield from _flat(f"{name}.{key}" if name else str(key), value[key])
    elif is_plain(value):
        yield name, list(value) if isinstance(value, list | tuple) else value
    elif isinstance(value, list | tuple):
        for idx, item in enumerate(value):
            yield from _flat(f"{name}[{idx}]", item)


def changes(now: Settings | None, before: Mapping[str, Any] | None) -> str:
    """Describe the settings that differ from a checkpoint's; empty if none is known to."""
    both = sorted((now or {}).keys() & (before or {}).keys())
    return ", ".join(
        f"{name} is {reprlib.repr(now[name])} (checkpoint: {reprlib.repr(before[name])})"
        for name in both
        if now and before and now[name] != before[name]
    )


def scheduled_keys(schedulers: Iterable[Any]) -> set[str]:
    """Return the settings of parameter groups that schedulers write."""
    keys: set[str] = set()
    for scheduler in schedulers:
        keys.add(getattr(scheduler, "param_group_key", "lr"))
        if any(getattr(part, "cycle_momentum", False) for part in _parts_of(scheduler)):
            keys |= set(_CYCLED)
    return keys


def is_of_torch(scheduler: Any) -> bool:
    """Return whether a scheduler and its members are classes of torch itself."""
    return all(
        isinstance(part, LRScheduler) and type(part).__module__.startswith("torch.")
        for part in _parts_of(scheduler)
    )


class Beginning:
    """The initial state of torch's schedulers and parameter groups, to replay steps from.

    Many of them compute each learning rate from the previous one, so that a changed setting
    requires a replay.

    Args:
        schedulers: All of a run; those that are not torch's are ignored.
        optimizers: Their optimizers.
    """

    def __init__(self, schedulers: Sequence[Any], optimizers: Iterable[Optimizer]) -> None:
        self._schedulers = [one for one in schedulers if isinstance(one, LRScheduler)]
        self._optimizers = list(optimizers)
        self.is_known = all(
            is_of_torch(one) and _steps_of(one.state_dict()) == 0 for one in self._schedulers
        )
        if self.is_known:
            self._states = [copy.deepcopy(one.state_dict()) for one in self._schedulers]
            keys = scheduled_keys(self._schedulers) | {"initial_lr", *_IN_GROUPS}
            self._groups = [
                {key: copy.deepcopy(group[key]) for key in keys & group.keys()}
                for group in self._all_groups()
            ]

    def _all_groups(self) -> list[dict[str, Any]]:
        return [group for one in self._optimizers for group in one.param_groups]

    def go_to(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Replay the steps of a checkpoint's schedulers.

        `states`: of torch's schedulers, in order.

        Raises:
            CheckpointMismatch: If the schedule is too short.
        """
        for group, values in zip(self._all_groups(), self._groups, strict=False):
            for key, value in values.items():
                _assign(group, key, value)
        for scheduler, state in zip(self._schedulers, self._states, strict=True):
            scheduler.load_state_dict(copy.deepcopy(state))
        nums = [_steps_of(state) or 0 for state in states]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the optimizer does not step in between
            for idx in range(max(nums)):
                for scheduler, num in zip(self._schedulers, nums, strict=True):
                    if idx < num:
                        _step(scheduler, num)


def _step(scheduler: Any, num: int) -> None:
    try:
        scheduler.step()
    except ValueError as error:
        raise CheckpointMismatch(
            f"schedulers: {kind_of(scheduler)} with its new settings ends before step {num} of "
            f"the checkpoint: {error}. Make it longer, or use the settings of the original run."
        ) from None


def _assign(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].copy_(value)
    else:
        group[key] = copy.deepcopy(value)


def _steps_of(state: Mapping[str, Any]) -> int | None:
    """Return the steps of a scheduler, for `ChainedScheduler` of its first member."""
    if "last_epoch" not in state and state.get("_schedulers"):
        return _steps_of(state["_schedulers"][0])
    num = state.get("last_epoch")
    return num if isinstance(num, int) else None


def _optimizer_of(scheduler: Any) -> Optimizer:
    optimizer: Optimizer = scheduler.optimizer
    return optimizer


def _members_of(scheduler: Any) -> list[Any]:
    return list(getattr(scheduler, "_schedulers", ())) if isinstance(scheduler, LRScheduler) else []


def _parts_of(scheduler: Any) -> list[Any]:
    """Return a scheduler and its members, recursively."""
    return [scheduler, *(part for one in _members_of(scheduler) for part in _parts_of(one))]


log = logging.getLogger("modelzoo_trainer.schedulers")

_KIND: Final = "scheduler_class"  # keys beside those of the scheduler
_SETTINGS: Final = "scheduler_settings"


class SchedulersCallback(CoreCallback, Interceptable):
    """Own `trainer.schedulers`; each is stepped once after every optimizer step.

    Args:
        schedulers: One or several schedulers of torch or of this package, or callables
            `optimizer -> scheduler`. For several optimizers: a mapping of their names to these;
            each scheduler is stepped after its optimizer.

    A run resumed with other settings of a schedule uses the new ones, as if they had applied from
    the start; for torch's schedulers with a warning. Classes derived from torch's use the settings
    of the checkpoint, with a warning.

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
    advice = "Use the original ones, or load parts of the checkpoint with LoadCheckpointStates."
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
