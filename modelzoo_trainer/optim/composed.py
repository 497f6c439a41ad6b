"""Schedules that are made of others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.errors import CheckpointMismatch, ConfigError
from modelzoo_trainer.optim.scheduler import LRScheduler, Scheduler, Tags, WeightDecayScheduler

Member = Scheduler | Callable[[None], Scheduler]
"""A schedule, or a callable that makes one without an optimizer."""


class Composed(Scheduler):
    """Base of schedules with members; these have no optimizer, and no tags of their own.

    Members that were made with the optimizer are released from it.
    """

    members: list[Scheduler]

    def _adopt(self, members: Sequence[Member], argument: str) -> None:
        """Take the members; a subclass does it first of all.

        `members`: all of the key of this class; callables are called.

        Raises:
            ConfigError: If one does not fit.
        """
        self.members = [one if isinstance(one, Scheduler) else _make(one) for one in members]
        if not self.members:
            raise ConfigError(f"{self._name}.{argument} is empty; it needs at least one schedule.")
        for member in self.members:
            self._check_member(member, argument)
        for member in reversed(self.members):  # the first knows what was there before all
            if member.optimizer is not None:
                member.release()

    def _check_member(self, member: object, argument: str) -> None:
        where = f"{self._name}.{argument}"
        if not isinstance(member, Scheduler):
            raise ConfigError(f"{where}: {member!r} is not a schedule of modelzoo_trainer.optim.")
        name = type(member).__name__
        if member.param_group_key != self.param_group_key:
            raise ConfigError(
                f"{where}: {name} schedules {member.param_group_key}, not {self.param_group_key}."
            )
        if member.param_group_tags is not None:
            raise ConfigError(
                f"{where}: {name} has param_group_tags; write them at {self._name} instead."
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "members": [one.state_dict() for one in self.members]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = state_dict["members"]
        if len(states) != len(self.members):
            raise CheckpointMismatch(
                f"the checkpoint's {self._name} has {len(states)} members, this one "
                f"{len(self.members)}. Use the schedules that it was made with."
            )
        for member, state in zip(self.members, states, strict=True):
            member.load_state_dict(state)
        super().load_state_dict(state_dict)


def _make(member: Any) -> Any:
    return member(None) if callable(member) else member


class Sequential(Composed):
    """One member after another, each for its `total_iters` and from its own step 0 on.

    Args:
        optimizer: Whose groups are written.
        schedulers: The members; all but the last need an end.
        milestones: The steps at which the second, third, ... begins; None for where the one
            before it ends, which a list must agree with.
        last_epoch: The step before the one at which the schedule begins; -1 = the start.
        param_group_tags: Only groups with one of these tags.
    """

    def __init__(
        self,
        optimizer: Optimizer | None,
        schedulers: list[Member],
        milestones: list[int] | None = None,
        last_epoch: int = -1,
        param_group_tags: Tags = None,
    ) -> None:
        if last_epoch < -1:
            raise ConfigError(
                f"{self._name}.last_epoch is {last_epoch}; it must be a step, or -1 for the start."
            )
        self._adopt(schedulers, "schedulers")
        self.milestones = self._find_milestones(milestones)
        self._starts = [0, *self.milestones]
        self._values = [member.value for member in self.members]
        last = self.members[-1].total_iters
        self.total_iters = None if last is None else self._starts[-1] + last
        super().__init__(optimizer, param_group_tags, last_epoch + 1)

    @override
    def value(self, step: int) -> float:
        idx = bisect_right(self.milestones, step)
        return self._values[idx](step - self._starts[idx])

    def _find_milestones(self, given: list[int] | None) -> list[int]:
        lengths = []
        for idx, member in enumerate(self.members[:-1]):
            length = member.total_iters
            if length is None:
                raise ConfigError(
                    f"{self._name}.schedulers[{idx}]: {type(member).__name__} has no total_iters; "
                    f"only the last schedule of a sequence may be without an end."
                )
            lengths.append(length)
        computed = list(accumulate(lengths))
        if given is not None and list(given) != computed:
            raise ConfigError(
                f"{self._name}.milestones is {list(given)}, but total_iters of the members add up "
                f"to {computed}. Leave milestones out."
            )
        return computed


class SequentialLR(Sequential, LRScheduler):
    """Schedules of the learning rate, one after another."""


class SequentialWD(Sequential, WeightDecayScheduler):
    """Schedules of weight decay, one after another."""


class Chained(Composed):
    """The first member, times what each other one has become of its own first value.

    Args:
        optimizer: Whose groups are written.
        schedulers: The members; all but the first must not begin at 0.
        param_group_tags: Only groups with one of these tags.
    """

    def __init__(
        self,
        optimizer: Optimizer | None,
        schedulers: list[Member],
        param_group_tags: Tags = None,
    ) -> None:
        self._adopt(schedulers, "schedulers")
        self._firsts = [member.value(0) for member in self.members]
        if 0.0 in self._firsts[1:]:
            raise ConfigError(
                f"{self._name}.schedulers[{self._firsts.index(0.0, 1)}] begins at 0, so what "
                f"becomes of it has no factor. Put it first."
            )
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        result = self.members[0].value(step)
        for member, first in zip(self.members[1:], self._firsts[1:], strict=True):
            result *= member.value(step) / first
        return result


class ChainedScheduler(Chained, LRScheduler):
    """Schedules of the learning rate, multiplied."""


class ChainedWD(Chained, WeightDecayScheduler):
    """Schedules of weight decay, multiplied."""


class ScalePerParamLR(Composed, LRScheduler):
    """Its member, times `adjust_learning_rate` of each group.

    Every schedule of the learning rate heeds that factor, so this one only says so.

    Args:
        optimizer: Whose groups are written.
        scheduler: The member.
        param_group_tags: Only groups with one of these tags.
    """

    def __init__(
        self,
        optimizer: Optimizer | None,
        scheduler: Member,
        param_group_tags: Tags = None,
    ) -> None:
        self._adopt([scheduler], "scheduler")
        self.total_iters = self.members[0].total_iters
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        return self.members[0].value(step)
