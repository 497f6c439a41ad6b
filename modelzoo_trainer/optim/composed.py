"""Schedules composed of other schedules."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.errors import CheckpointMismatch, ConfigError
from modelzoo_trainer.optim.scheduler import (
    LRScheduler,
    Scheduler,
    Tags,
    WeightDecayScheduler,
    without_optimizer,
)

Member = Scheduler | Callable[[None], Scheduler]
"""A schedule, or a callable that creates one without an optimizer."""


class Composed(Scheduler):
    """Base class of composed schedules; their members have neither an optimizer nor tags.

    Members that were created with the optimizer are released from it.
    """

    members: list[Scheduler]

    def _adopt(self, members: Sequence[Member], argument: str) -> None:
        """Set the members; called first in the constructor of a subclass.

        `members`: all of the key of this class; callables are called.

        Raises:
            ConfigError: If one is invalid.
        """
        self.members = [one if isinstance(one, Scheduler) else _make(one) for one in members]
        if not self.members:
            raise ConfigError(f"{self._name}.{argument} is empty. Pass at least one scheduler.")
        for member in self.members:
            self._check_member(member, argument)
        for member in reversed(self.members):  # the first one restores the original values
            if member.optimizer is not None:
                member.release()

    def _check_member(self, member: object, argument: str) -> None:
        where = f"{self._name}.{argument}"
        if not isinstance(member, Scheduler):
            raise ConfigError(f"{where}: {member!r} is not a scheduler of modelzoo_trainer.optim.")
        name = type(member).__name__
        if member.param_group_key != self.param_group_key:
            raise ConfigError(
                f"{where}: all schedulers here must change {self.param_group_key}, but {name} "
                f"changes {member.param_group_key}."
            )
        if member.param_group_tags is not None:
            raise ConfigError(
                f"{where}: {name} sets param_group_tags. Set them in {self._name} instead."
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "members": [one.state_dict() for one in self.members]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = state_dict["members"]
        if len(states) != len(self.members):
            raise CheckpointMismatch(
                f"The checkpoint's {self._name} has {len(states)} schedulers, this one has "
                f"{len(self.members)}. Use the same schedulers as in the original run."
            )
        for member, state in zip(self.members, states, strict=True):
            member.load_state_dict(state)
        super().load_state_dict(state_dict)


def _make(member: Any) -> Any:
    return member(None) if callable(member) else member


class Sequential(Composed):
    """One schedule after another, each for its `total_iters`, starting at its own step 0.

    Args:
        optimizer: Optimizer whose parameter groups are updated.
        schedulers: The members; all except the last one require `total_iters`.
        milestones: Steps at which the second, third, ... member begins; None = where the previous
            one ends. A given list must agree with that.
        last_epoch: The step before the first one; -1 = start.
        param_group_tags: Update only groups with one of these tags.
    """

    @without_optimizer
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
                    f"{self._name}.schedulers[{idx}]: {type(member).__name__} has no total_iters, "
                    f"so it never ends. Only the last schedule of a sequence may have no end."
                )
            lengths.append(length)
        computed = list(accumulate(lengths))
        if given is not None and list(given) != computed:
            raise ConfigError(
                f"{self._name}.milestones is {list(given)}, but the total_iters of the schedules "
                f"add up to {computed}. Remove milestones."
            )
        return computed


class SequentialLR(Sequential, LRScheduler):
    """Learning rate schedules, one after another."""


class SequentialWD(Sequential, WeightDecayScheduler):
    """Weight decay schedules, one after another."""


class Chained(Composed):
    """The first schedule times the relative change of each of the others since its first step.

    Args:
        optimizer: Optimizer whose parameter groups are updated.
        schedulers: The members; all except the first one must not begin at 0.
        param_group_tags: Update only groups with one of these tags.
    """

    @without_optimizer
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
                f"{self._name}.schedulers[{self._firsts.index(0.0, 1)}] starts at 0. Each "
                f"schedule but the first is divided by its first value, so only the first one may "
                f"start at 0. Move this one to the front."
            )
        super().__init__(optimizer, param_group_tags)

    @override
    def value(self, step: int) -> float:
        result = self.members[0].value(step)
        for member, first in zip(self.members[1:], self._firsts[1:], strict=True):
            result *= member.value(step) / first
        return result


class ChainedScheduler(Chained, LRScheduler):
    """Learning rate schedules, multiplied."""


class ChainedWD(Chained, WeightDecayScheduler):
    """Weight decay schedules, multiplied."""


class ScalePerParamLR(Composed, LRScheduler):
    """A schedule, multiplied by the `adjust_learning_rate` of each group.

    Every learning rate schedule applies that factor; this class only makes it explicit.

    Args:
        optimizer: Optimizer whose parameter groups are updated.
        scheduler: The schedule.
        param_group_tags: Update only groups with one of these tags.
    """

    @without_optimizer
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
