"""The closing line of `check`: whether a file runs here, and what is missing if not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from modelzoo_trainer.config.plan import METHODS, TrainerPlan
from modelzoo_trainer.config.positions import DATA, Lack
from modelzoo_trainer.config.printout.run import missing_weights

LABEL: Final = "Verdict: "
_MOST_SHOWN: Final = 3  # missing folders and files
_RUNS: Final = {"fit": "trains"}


def lacks_of(plans: Sequence[TrainerPlan]) -> list[Lack]:
    """Return what the trainers of a file need and is not here, each once, in the file's order.

    `plans`: checked with `for_a_run=False`.
    """
    found = [note.lack for plan in plans for note in plan.notes if note.lack is not None]
    found += [
        Lack("setting", f"{plan.method}.{METHODS[plan.method].ckpt}")
        for plan in plans[:1]  # later trainers may start from what earlier ones write
        if plan.method is not None and missing_weights(plan) is not None
    ]
    return list(dict.fromkeys(found))


def runs_here(plans: Sequence[TrainerPlan]) -> bool:
    """Return whether the command that runs the file would begin, as far as the file shows."""
    return _methods(plans) != [None] and not lacks_of(plans)


def _methods(plans: Sequence[TrainerPlan]) -> list[str | None]:
    return list(dict.fromkeys(plan.method for plan in plans))


def verdict(plans: Sequence[TrainerPlan]) -> str:
    """Return one line: the file trains here, needs data, or cannot run here and why."""
    methods = _methods(plans)
    if methods == [None]:
        return f"{LABEL}nothing to run; the file has none of {', '.join(METHODS)}."
    lacks = lacks_of(plans)
    others = [f"{one.kind} {one.what!r}" for one in lacks if one.kind != DATA]
    data = [one.what for one in lacks if one.kind == DATA]
    shown = "; ".join(data[:_MOST_SHOWN])
    if len(data) > _MOST_SHOWN:
        shown += f"; and {len(data) - _MOST_SHOWN} more"
    if others:
        more = f"; needs data: {shown}" if data else ""
        return f"{LABEL}cannot run here; missing: {', '.join(others)}{more}."
    if data:
        return f"{LABEL}needs data: {shown}."
    runs = {_RUNS.get(method or "", "runs") for method in methods}
    return f"{LABEL}{runs.pop() if len(runs) == 1 else 'runs'} here."
