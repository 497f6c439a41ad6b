"""Print the schedules: values at informative steps, and a curve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from modelzoo_trainer.config.components import Component
from modelzoo_trainer.config.names import Unshipped
from modelzoo_trainer.config.plan import TrainerPlan
from modelzoo_trainer.config.report.components import WIDTH, class_name, wrapped
from modelzoo_trainer.config.report.length import RunLength
from modelzoo_trainer.optim import Scheduler

_MOST_STEPS: Final = 9
_MOST_TURNS: Final = 5
_LEVELS: Final = "_.:-=+*#%@"  # from the lowest value to the highest
_CURVE: Final = 60  # characters
_LABEL: Final = 8
_INDENT: Final = 6
_WITHOUT_AN_END: Final = 1000  # steps that are shown if neither run nor schedule has an end


def schedule_lines(plan: TrainerPlan) -> list[str]:
    """Return a preview of each schedule.

    `plan`: one trainer; its schedules are made without an optimizer.
    """
    length = RunLength.of(plan)
    lines: list[str] = []
    for idx, component in enumerate(plan.init.get("schedulers", ())):
        lines += _preview(f"schedulers[{idx}]", component, length)
    return lines


def _preview(label: str, component: Component, length: RunLength) -> list[str]:
    name = class_name(component.target)
    if not _is_ours(component):
        return [f"  {label}: {name}: values are known only at run time"]
    made: Scheduler = component.make(None)
    tags = made.param_group_tags
    groups = "all parameter groups" if tags is None else f"groups tagged {', '.join(tags)}"
    head = f"{label}: {name} sets {made.param_group_key} of {groups}"
    end = length.end if length.end is not None else length.bound
    turns = _turns(made, -made.last_step)
    last = end or max([1, *turns] if turns else [_WITHOUT_AN_END])
    steps = telling_steps(made, last)
    lines = wrapped(head, 2) + _table(made, steps) + _curve(made, steps)
    for hint in _hints(made, length.end):
        lines += wrapped(f"hint: {hint}", _INDENT)
    return lines


def _is_ours(component: Component) -> bool:
    """Return whether a schedule and all of its members are shipped, so that it is safe to build."""
    target = component.target
    if isinstance(target, Unshipped) or not (
        isinstance(target, type)
        and issubclass(target, Scheduler)
        and target.__module__.startswith("modelzoo_trainer.")
    ):
        return False
    if component.arguments.keys() & {"lr_lambda", "val_lambda"}:
        return False  # its values come from a function of the user's
    members: list[Any] = []
    for value in component.arguments.values():
        members += value if isinstance(value, list) else [value]
    return all(_is_ours(member) for member in members if isinstance(member, Component))


def value_at(schedule: Scheduler, step: int) -> float:
    """Return the value after a number of steps; infinity if it is too large for a float."""
    try:
        return schedule.value(schedule.last_step + step)
    except OverflowError:
        return math.inf


def telling_steps(schedule: Scheduler, last: int) -> list[int]:
    """Return the most informative steps of a schedule, in order of importance."""
    turns = [step for step in _turns(schedule, -schedule.last_step) if 0 < step < last]
    turns = [turns[idx] for idx in _spread(len(turns), _MOST_TURNS)]
    quarters = [round(last * part / 4) for part in (2, 1, 3)]
    return list(dict.fromkeys([0, last, *turns, 1, *quarters]))[:_MOST_STEPS]


def _spread(num: int, most: int) -> Sequence[int]:
    """Return at most `most` of the indices of `num` things, evenly spaced, with both ends."""
    if num <= most:
        return range(num)
    return [round(idx * (num - 1) / (most - 1)) for idx in range(most)]


def _turns(schedule: Scheduler, start: int = 0) -> list[int]:
    """Return the steps at which a schedule or one of its members switches or ends."""
    milestones: list[int] = list(getattr(schedule, "milestones", ()))
    members: list[Scheduler] = getattr(schedule, "members", [])
    begins = [0, *milestones] if len(members) == len(milestones) + 1 else [0] * len(members)
    found = {start + step for step in milestones}
    if schedule.total_iters is not None:
        found.add(start + schedule.total_iters)
    for member, begin in zip(members, begins, strict=True):
        found.update(_turns(member, start + begin))
    return sorted(found)


def _table(schedule: Scheduler, steps: list[int]) -> list[str]:
    """Return a line of steps and one of values, as many as fit into the width."""
    while True:
        cells = [(str(step), f"{value_at(schedule, step):.4g}") for step in sorted(steps)]
        width = max(len(text) for cell in cells for text in cell) + 2
        if _INDENT + _LABEL + width * len(cells) <= WIDTH:
            break
        steps = steps[:-1]
    rows = zip(("steps", "value"), zip(*cells, strict=True), strict=True)
    return [
        f"{' ' * _INDENT}{label:{_LABEL}}{''.join(f'{text:>{width}}' for text in row)}"
        for label, row in rows
    ]


def _curve(schedule: Scheduler, steps: list[int]) -> list[str]:
    """Return a line with denser characters for higher values; none if the value is constant."""
    last = max(steps)
    num = min(_CURVE, last + 1)
    values = [value_at(schedule, round(last * idx / max(1, num - 1))) for idx in range(num)]
    known = [*values, *(value_at(schedule, step) for step in steps)]  # with those of the peaks
    low, high = min(known), max(known)
    if low == high or not all(map(math.isfinite, known)):
        return []
    top = len(_LEVELS) - 1
    drawn = "".join(_LEVELS[round((value - low) / (high - low) * top)] for value in values)
    return [f"{' ' * _INDENT}{'curve':{_LABEL}}  {drawn}  {low:.4g} to {high:.4g}"]


def _hints(schedule: Scheduler, end: int | None) -> Iterator[str]:
    if end is None:
        return
    now = value_at(schedule, end)
    if math.isinf(now):
        yield f"at step {end} the value is too large for a float: the run will fail"
        return
    first = schedule.last_step
    total = None if schedule.total_iters is None else max(0, schedule.total_iters - first)
    if total is not None and total < end and _stays(schedule, total, end):
        yield f"the schedule ends at step {total}, the run at {end}: constant at {now:.4g} then"
    if total is not None and total > end and value_at(schedule, total) != now:
        yield (
            f"the schedule ends at step {total}, the run at {end}: it reaches {now:.4g} instead of "
            f"{value_at(schedule, total):.4g}"
        )
    late = [step - first for step in getattr(schedule, "milestones", ()) if step - first >= end]
    if late:
        steps = ", ".join(map(str, late[:3])) + ", ..." * (len(late) > 3)
        yield f"milestones after the end of the run at step {end}: {steps}"


def _stays(schedule: Scheduler, total: int, end: int) -> bool:
    """Return whether a schedule changes before step `total` and not after, at sampled steps."""
    rest = {value_at(schedule, step) for step in (total, (total + end) // 2, end)}
    before = {value_at(schedule, step) for step in (0, total // 2)}
    return len(rest) == 1 and before != rest
