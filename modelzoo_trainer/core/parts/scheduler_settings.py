"""The settings of schedulers, to compare a resumed run, and a replay of torch's schedulers."""

from __future__ import annotations

import copy
import reprlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from modelzoo_trainer.core.parts.optimizer_facts import is_plain
from modelzoo_trainer.errors import CheckpointMismatch

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
