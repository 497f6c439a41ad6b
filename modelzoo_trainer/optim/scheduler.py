"""Base class of schedules: an absolute value per step, written to parameter groups."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import Any, ClassVar, TypeVar

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import dataclass_transform, override

from modelzoo_trainer.base.constraints import checked_dataclass
from modelzoo_trainer.errors import ConfigError

Group = dict[str, Any]
Tags = str | list[str] | None
_F = TypeVar("_F", bound=Callable[..., None])
_T = TypeVar("_T")

NO_DECAY = "no_weight_decay"
"""Key of a parameter group without weight decay, which weight decay schedules skip."""

LR_FACTOR = "adjust_learning_rate"
"""Key of the learning rate factor of a group, which schedules apply."""


def without_optimizer(init: _F) -> _F:
    """Let a constructor be called without `optimizer`, its first argument, as of a member."""

    @functools.wraps(init)
    def filled(self: Any, *args: Any, **kwargs: Any) -> None:
        if not args:
            kwargs.setdefault("optimizer", None)
        init(self, *args, **kwargs)

    return filled  # type: ignore[return-value]  # signature of `wraps`


@dataclass_transform(eq_default=False, field_specifiers=(field,))
def schedule_dataclass(cls: type[_T]) -> type[_T]:
    """Make a schedule a `checked_dataclass` whose `optimizer` may be omitted."""
    made: Any = checked_dataclass(cls)
    made.__init__ = without_optimizer(made.__init__)
    return made  # type: ignore[no-any-return]  # the class itself


class Scheduler(ABC):
    """Write `value(step)` to the parameter groups after every optimizer step.

    The value is absolute: previous values of the groups do not matter. A subclass sets its own
    attributes first and calls this constructor last, since binding calls `value(0)`; for a
    dataclass, `__post_init__` does so.

    Args:
        optimizer: Optimizer whose parameter groups are updated; None = `bind` later, or member of
            another schedule.
        param_group_tags: Update only groups with one of these tags; None = all.
        first_step: The first step.

    Raises:
        ConfigError: If no group has such a tag, or the optimizer has no such setting.
    """

    param_group_key: ClassVar[str]
    optimizer: Optimizer | None
    param_group_tags: str | Sequence[str] | None
    total_iters: int | None
    """Number of steps after which the schedule ends; None = no end."""

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        param_group_tags: str | Sequence[str] | None = None,
        first_step: int = 0,
    ) -> None:
        self.optimizer = None
        self.param_group_tags = _as_tuple(param_group_tags)
        if self.param_group_tags == ():
            raise ConfigError(
                f"{self._name}.param_group_tags is empty. Set a tag, or None (null) for all "
                f"parameter groups."
            )
        if not hasattr(self, "total_iters"):  # a field, or a property of a subclass
            self.total_iters = None
        self.last_step = first_step
        self._seen: list[Group] | None = None
        self._targets: list[tuple[Group, float]] = []
        self._before: list[Any] = []
        self._last_value = 0.0
        if optimizer is not None:
            self.bind(optimizer)

    def __post_init__(self) -> None:
        Scheduler.__init__(self, self.optimizer, self.param_group_tags)

    @abstractmethod
    def value(self, step: int) -> float:
        """Return the value at a step; it depends on nothing else.

        Args:
            step: Number of optimizer steps taken.
        """

    def bind(self, optimizer: Optimizer) -> None:
        """Set the optimizer whose groups are updated, and write the value of the first step.

        Args:
            optimizer: Its groups already have their tags.

        Raises:
            ConfigError: If the schedule already has an optimizer, or does not fit this one.
        """
        if self.optimizer is not None:
            raise ConfigError(
                f"{self._name} already has an optimizer. Create a new scheduler for each optimizer."
            )
        self._find_targets(optimizer)
        self.optimizer = optimizer
        held = [group[self.param_group_key] for group, _ in self._targets]
        self._before = [value.clone() if isinstance(value, Tensor) else value for value in held]
        self._write(self.value(self.last_step))

    def release(self) -> None:
        """Unbind the optimizer, and restore the values of its groups before `bind`."""
        for (group, _), value in zip(self._targets, self._before, strict=True):
            _assign(group, self.param_group_key, value)
        self.optimizer = self._seen = None
        self._targets, self._before = [], []

    def values_before(self) -> list[tuple[Group, Any]]:
        """Return the groups that are updated, each with its value before `bind`."""
        groups = [group for group, _ in self._targets]
        return list(zip(groups, self._before, strict=True))

    def current_values(self) -> list[float]:
        """Return the values of the optimizer's groups that it updates; none before `bind`."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        own = (group for group in groups if self._fits(group) and self._takes(group))
        return [float(group[self.param_group_key]) for group in own]

    def step(self) -> None:
        """Advance by one step, and write the value."""
        self.last_step += 1
        self._write(self.value(self.last_step))

    def get_last_value(self) -> list[float]:
        """Return the values written last, one for each group."""
        return [self._last_value * factor for _, factor in self._targets]

    def get_last_lr(self) -> list[float]:
        """Return `get_last_value`, under torch's name."""
        return self.get_last_value()

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return {"last_step": self.last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the step of a checkpoint, and write its value.

        Args:
            state_dict: What `state_dict` returned.
        """
        self.last_step = int(state_dict["last_step"])
        if self.optimizer is not None:
            self._write(self.value(self.last_step))

    @property
    def _tags(self) -> tuple[str, ...] | None:
        return _as_tuple(self.param_group_tags)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _write(self, value: float) -> None:
        optimizer = self.optimizer
        if optimizer is None:
            raise ConfigError(f"{self._name} has no optimizer. Call bind(optimizer) first.")
        if optimizer.param_groups is not self._seen:  # loading creates new groups
            self._find_targets(optimizer)
        key = self.param_group_key
        self._last_value = value
        for group, factor in self._targets:
            if type(group[key]) is float:
                group[key] = value * factor
            else:
                _assign(group, key, value * factor)

    def _find_targets(self, optimizer: Optimizer) -> None:
        groups = [group for group in optimizer.param_groups if self._fits(group)]
        if not groups:
            known = sorted({tag for group in optimizer.param_groups for tag in _tags_of(group)})
            raise ConfigError(
                f"{self._name}.param_group_tags is {list(self._tags or ())}, but no parameter "
                f"group has one of these tags. Tags of the optimizer: {', '.join(known) or 'none'}."
            )
        if any(self.param_group_key not in group for group in groups):
            raise ConfigError(
                f"{self._name} changes {self.param_group_key}, but {type(optimizer).__name__} has "
                f"no such setting. Remove the schedule."
            )
        self._seen = optimizer.param_groups
        self._targets = [(group, self._factor_of(group)) for group in groups if self._takes(group)]

    def _fits(self, group: Group) -> bool:
        """Return whether the tags select this group."""
        return self._tags is None or not set(self._tags).isdisjoint(_tags_of(group))

    def _takes(self, group: Group) -> bool:
        """Return whether a selected group is updated."""
        return True

    def _factor_of(self, group: Group) -> float:
        """Return the factor on the value for this group."""
        return 1.0


class LRScheduler(Scheduler):
    """A learning rate schedule; a group's `adjust_learning_rate`, if any, is a factor on it."""

    param_group_key = "lr"

    @override
    def _factor_of(self, group: Group) -> float:
        return float(group.get(LR_FACTOR, 1.0))


class WeightDecayScheduler(Scheduler):
    """A weight decay schedule; groups without weight decay keep 0."""

    param_group_key = "weight_decay"

    @override
    def _takes(self, group: Group) -> bool:
        return not group.get(NO_DECAY, False)


def check_conflicts(schedulers: Iterable[Scheduler]) -> None:
    """Check that no two schedules set the same value of the same parameter group.

    Args:
        schedulers: All schedules of a run.

    Raises:
        ConfigError: If two with the same key share a tag or a group, or one of them has no tags.
    """
    by_key: dict[str, list[Scheduler]] = {}
    for scheduler in schedulers:
        by_key.setdefault(scheduler.param_group_key, []).append(scheduler)
    for key, rivals in by_key.items():
        if len(rivals) > 1:
            _check_rivals(key, rivals)


def _check_rivals(key: str, rivals: Sequence[Scheduler]) -> None:
    tag_owner: dict[str, str] = {}
    group_owner: dict[int, str] = {}
    for scheduler in rivals:
        name = type(scheduler).__name__
        tags = scheduler._tags
        if tags is None:
            raise ConfigError(
                f"schedulers: {len(rivals)} of them change {key}, but {name} does so in all "
                f"parameter groups. Set param_group_tags in each."
            )
        for tag in tags:
            if tag in tag_owner:
                raise ConfigError(
                    f"schedulers: {tag_owner[tag]} and {name} both change {key} of the groups "
                    f"with the tag {tag!r}. Remove tag {tag!r} from one of them."
                )
        tag_owner |= dict.fromkeys(tags, name)
        for group, _ in scheduler._targets:
            if id(group) in group_owner:
                raise ConfigError(
                    f"schedulers: {group_owner[id(group)]} and {name} both change {key} of the "
                    f"group with the tags {sorted(_tags_of(group))}. Remove tags from their "
                    f"param_group_tags until only one matches."
                )
            group_owner[id(group)] = name


def _as_tuple(tags: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if tags is None:
        return None
    return (tags,) if isinstance(tags, str) else tuple(tags)


def _tags_of(group: Group) -> tuple[str, ...]:
    return _as_tuple(group.get("tags")) or ()


def _assign(group: Group, key: str, value: Any) -> None:
    held = group[key]
    if isinstance(held, Tensor):
        held.fill_(value)
    else:
        group[key] = value
