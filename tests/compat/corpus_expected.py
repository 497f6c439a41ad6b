"""What a published configuration says of its schedules, worked out from its text alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from math import cos, pi
from typing import Any

Plain = Mapping[str, Any]

_UNSCHEDULED = {"lr": 1e-3, "weight_decay": 0.0}
"""The format's defaults of the optimizers that the files use."""


def value_at(schedule: Plain, step: int) -> float:
    """Return the value of a schedule.

    Args:
        schedule: `{ClassName: {arguments}}`.
        step: Number of optimizer steps taken.
    """
    name, arguments = only(schedule)
    return _CURVES[name](arguments, step)


def only(component: Plain) -> tuple[str, Plain]:
    """Return the class name and the arguments of `{ClassName: {arguments}}`."""
    ((name, arguments),) = component.items()
    return name, arguments or {}


def _part(done: int, total: int) -> float:
    return min(done / total, 1.0)


def _linear(given: Plain, step: int) -> float:
    part = _part(step, given["total_iters"])
    return (1 - part) * given["initial_learning_rate"] + part * given["end_learning_rate"]


def _cosine(first: float, last: float, part: float) -> float:
    weight = cos(pi / 2 * part) ** 2
    return weight * first + (1 - weight) * last


def _cosine_decay(given: Plain, step: int) -> float:
    part = _part(step, given["total_iters"])
    return _cosine(given["initial_learning_rate"], given["end_learning_rate"], part)


def _cosine_decay_wd(given: Plain, step: int) -> float:
    part = _part(step, given["total_iters"])
    return _cosine(given["initial_val"], given["end_val"], part)


def _cosine_annealing(given: Plain, step: int) -> float:
    lowest = given.get("eta_min", 0.0)
    return _cosine(given["initial_learning_rate"], lowest, step / given["T_max"])


def _inverse_square_root(given: Plain, step: int) -> float:
    first = given.get("initial_learning_rate", 1.0) * given.get("scale", 1.0)
    return float(first * max(given.get("warmup_steps", 1), step) ** -0.5)


def _sequential(given: Plain, step: int) -> float:
    *others, last = given["schedulers"]
    for member in others:
        length = only(member)[1]["total_iters"]
        if step < length:
            return value_at(member, step)
        step -= length
    return value_at(last, step)


_CURVES: dict[str, Callable[[Plain, int], float]] = {
    "ConstantLR": lambda given, step: given["learning_rate"],
    "CosineAnnealingLR": _cosine_annealing,
    "CosineDecayLR": _cosine_decay,
    "CosineDecayWD": _cosine_decay_wd,
    "InverseSquareRootDecayLR": _inverse_square_root,
    "LinearLR": _linear,
    "ScalePerParamLR": lambda given, step: value_at(given["scheduler"], step),
    "SequentialLR": _sequential,
}


def milestones(schedule: Plain) -> list[int]:
    """Return the steps at which a schedule changes, from 0 on, in their order."""
    name, given = only(schedule)
    if name == "ScalePerParamLR":
        return milestones(given["scheduler"])
    members = given["schedulers"] if name == "SequentialLR" else [schedule]
    lengths = [_length(*only(member)) for member in members]
    return list(accumulate(lengths, initial=0))


def _length(name: str, given: Plain) -> int:
    key = {"InverseSquareRootDecayLR": "warmup_steps", "CosineAnnealingLR": "T_max"}
    return int(given.get(key.get(name, "total_iters"), 1000))


def telling_steps(schedule: Plain) -> list[int]:
    """Return the first steps, those around each milestone, those between, and one far away."""
    ends = milestones(schedule)
    around = {end + offset for end in ends for offset in (-1, 0, 1, 2)}
    between = {(start + end) // 2 for start, end in pairwise(ends)}
    return sorted(step for step in {*around, *between, 3 * ends[-1]} if step >= 0)


def key_of(schedule: Plain) -> str:
    """Return which setting of a parameter group a schedule sets."""
    return "weight_decay" if only(schedule)[0].endswith("WD") else "lr"


def tags_of(schedule: Plain) -> frozenset[str] | None:
    """Return the tags that a schedule is limited to; None = it sets all groups."""
    tags = only(schedule)[1].get("param_group_tags")
    return None if tags is None else frozenset([tags] if isinstance(tags, str) else tags)


def filters_of(optimizer: Plain) -> Iterator[tuple[str, str]]:
    """Yield the globs of an optimizer's filters, each with its tag."""
    for entry in optimizer.get("params") or ():
        globs = entry["params"]
        for glob in [globs] if isinstance(globs, str) else globs:
            yield glob, entry["tag"]


def schedules_for(name: str, key: str, optimizer: Plain, schedules: Iterable[Plain]) -> list[Plain]:
    """Return the schedules that set one setting of one parameter.

    Args:
        name: Of the parameter.
        key: "lr" or "weight_decay".
        optimizer: The arguments of the optimizer.
        schedules: All of the file.
    """
    tags = {tag for glob, tag in filters_of(optimizer) if fnmatchcase(name, glob)}
    rivals = [(tags_of(schedule), schedule) for schedule in schedules if key_of(schedule) == key]
    return [schedule for limit, schedule in rivals if limit is None or limit & tags]


def rates_at(step: int, names: Iterable[str], init: Plain) -> dict[str, float]:
    """Return the learning rate of each parameter at a step.

    Args:
        step: Number of optimizer steps taken.
        names: Of the parameters.
        init: The section of the file.
    """
    _, optimizer = only(init["optimizer"])
    given = optimizer.get("lr", optimizer.get("learning_rate", _UNSCHEDULED["lr"]))
    factors = optimizer.get("adjust_learning_rate") or {}
    return {
        name: _scheduled(name, "lr", step, init, given) * factors.get(name.split(".")[0], 1.0)
        for name in names
    }


def decays_at(step: int, names: Iterable[str], init: Plain) -> dict[str, float]:
    """Return the weight decay of each parameter at a step; biases and norms have none.

    Args:
        step: Number of optimizer steps taken.
        names: Of the parameters.
        init: The section of the file.
    """
    _, optimizer = only(init["optimizer"])
    given = optimizer.get("weight_decay", _UNSCHEDULED["weight_decay"])
    return {
        name: 0.0
        if "bias" in name or name.startswith("norm.")
        else _scheduled(name, "weight_decay", step, init, given)
        for name in names
    }


def _scheduled(name: str, key: str, step: int, init: Plain, otherwise: float) -> float:
    _, optimizer = only(init["optimizer"])
    found = schedules_for(name, key, optimizer, init.get("schedulers") or ())
    assert len(found) <= 1, f"{len(found)} schedules set {key} of {name}"
    return value_at(found[0], step) if found else otherwise
