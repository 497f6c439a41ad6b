"""What a schedule does in a run: its values, where it switches, and hints about its end."""

from __future__ import annotations

import math
from collections.abc import Iterator

from modelzoo_trainer.optim.scheduler import Scheduler


def value_at(schedule: Scheduler, step: int, first: int) -> float:
    """Return the value after a number of steps of a run; infinity if it is too large for a float.

    `first`: the step of the schedule at which the run begins.
    """
    try:
        return schedule.value(first + step)
    except OverflowError:
        return math.inf


def turns(schedule: Scheduler, start: int = 0) -> list[int]:
    """Return the steps at which a schedule or one of its members switches or ends."""
    milestones: list[int] = list(getattr(schedule, "milestones", ()))
    members: list[Scheduler] = getattr(schedule, "members", [])
    begins = [0, *milestones] if len(members) == len(milestones) + 1 else [0] * len(members)
    found = {start + step for step in milestones}
    if schedule.total_iters is not None:
        found.add(start + schedule.total_iters)
    for member, begin in zip(members, begins, strict=True):
        found.update(turns(member, start + begin))
    return sorted(found)


def schedule_hints(schedule: Scheduler, end: int, first: int) -> Iterator[str]:
    """Yield hints about a schedule in a run that ends at step `end`.

    `first`: the step of the schedule at which the run begins.
    """
    now = value_at(schedule, end, first)
    if math.isinf(now):
        yield f"at step {end} the value is too large for a float: the run will fail"
        return
    total = None if schedule.total_iters is None else max(0, schedule.total_iters - first)
    if total is not None and total < end and _stays(schedule, total, end, first):
        yield (
            f"the schedule ends at step {total}, before the end of the run at step {end}: the "
            f"value stays at {now:.4g}"
        )
    if total is not None and total > end and value_at(schedule, total, first) != now:
        yield (
            f"the schedule ends at step {total}, after the end of the run at step {end}: the last "
            f"value is {now:.4g} instead of {value_at(schedule, total, first):.4g}"
        )
    late = [step - first for step in getattr(schedule, "milestones", ()) if step - first >= end]
    if late:
        steps = ", ".join(map(str, late[:3])) + ", ..." * (len(late) > 3)
        yield f"milestones after the end of the run at step {end}: {steps}"


def unused_rate_hint(schedule: Scheduler, given: float) -> Iterator[str]:
    """Yield a hint if a schedule replaces the optimizer's learning rate, and never has its value.

    `given`: the optimizer's own learning rate, which the user has set.
    """
    if schedule.param_group_key != "lr" or schedule.param_group_tags is not None:
        return
    values = [value_at(schedule, step, 0) for step in (0, *turns(schedule))]
    values += _own_numbers(schedule)
    if not any(math.isclose(given, value, rel_tol=1e-6) for value in values):
        yield f"the optimizer's learning rate of {given:.4g} has no effect: the schedule sets it"


def _own_numbers(schedule: Scheduler) -> list[float]:
    """Return the arguments of a schedule and its members that are floats."""
    members: list[Scheduler] = getattr(schedule, "members", [])
    own = [value for value in vars(schedule).values() if isinstance(value, float)]
    return own + [value for member in members for value in _own_numbers(member)]


def _stays(schedule: Scheduler, total: int, end: int, first: int) -> bool:
    """Return whether a schedule changes before step `total` and not after, at sampled steps."""
    rest = {value_at(schedule, step, first) for step in (total, (total + end) // 2, end)}
    before = {value_at(schedule, step, first) for step in (0, total // 2)}
    return len(rest) == 1 and before != rest
