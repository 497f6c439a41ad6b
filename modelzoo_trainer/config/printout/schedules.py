"""Print the schedules: values at informative steps, and a curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from modelzoo_trainer.config.components import Component
from modelzoo_trainer.config.names import Unshipped
from modelzoo_trainer.config.plan import TrainerPlan
from modelzoo_trainer.config.printout.components import WIDTH, class_name, wrapped
from modelzoo_trainer.config.printout.length import RunLength
from modelzoo_trainer.optim import Scheduler
from modelzoo_trainer.optim.preview import schedule_hints, turns, unused_rate_hint, value_at

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
        lines += _preview(f"schedulers[{idx}]", component, length, _given_rate(plan))
    return lines


def _given_rate(plan: TrainerPlan) -> float | None:
    """Return the learning rate that the optimizer's section sets, if it is a number."""
    arguments = getattr(plan.init.get("optimizer"), "arguments", {})
    given = arguments.get("lr", arguments.get("learning_rate"))
    return given if isinstance(given, float) else None


def _preview(label: str, component: Component, length: RunLength, rate: float | None) -> list[str]:
    name = class_name(component.target)
    if not _is_ours(component):
        return [f"  {label}: {name}: values are known only at run time"]
    made: Scheduler = component.make(None)
    tags = made.param_group_tags
    groups = "all parameter groups" if tags is None else f"groups tagged {', '.join(tags)}"
    head = f"{label}: {name} sets {made.param_group_key} of {groups}"
    end = length.end if length.end is not None else length.bound
    milestones = turns(made, -made.last_step)
    last = end or max([1, *milestones] if milestones else [_WITHOUT_AN_END])
    steps = telling_steps(made, last)
    lines = wrapped(head, 2) + _table(made, steps) + _curve(made, steps)
    hints = [] if length.end is None else [*schedule_hints(made, length.end, made.last_step)]
    hints += () if rate is None else unused_rate_hint(made, rate)
    for hint in hints:
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


def telling_steps(schedule: Scheduler, last: int) -> list[int]:
    """Return the most informative steps of a schedule, in order of importance."""
    found = [step for step in turns(schedule, -schedule.last_step) if 0 < step < last]
    found = [found[idx] for idx in _spread(len(found), _MOST_TURNS)]
    quarters = [round(last * part / 4) for part in (2, 1, 3)]
    return list(dict.fromkeys([0, last, *found, 1, *quarters]))[:_MOST_STEPS]


def _spread(num: int, most: int) -> Sequence[int]:
    """Return at most `most` of the indices of `num` things, evenly spaced, with both ends."""
    if num <= most:
        return range(num)
    return [round(idx * (num - 1) / (most - 1)) for idx in range(most)]


def _table(schedule: Scheduler, steps: list[int]) -> list[str]:
    """Return a line of steps and one of values, as many as fit into the width."""
    while True:
        cells = [
            (str(step), f"{value_at(schedule, step, schedule.last_step):.4g}")
            for step in sorted(steps)
        ]
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
    values = [
        value_at(schedule, round(last * idx / max(1, num - 1)), schedule.last_step)
        for idx in range(num)
    ]
    known = [
        *values,
        *(value_at(schedule, step, schedule.last_step) for step in steps),
    ]  # with those of the peaks
    low, high = min(known), max(known)
    if low == high or not all(map(math.isfinite, known)):
        return []
    top = len(_LEVELS) - 1
    drawn = "".join(_LEVELS[round((value - low) / (high - low) * top)] for value in values)
    return [f"{' ' * _INDENT}{'curve':{_LABEL}}  {drawn}  {low:.4g} to {high:.4g}"]
