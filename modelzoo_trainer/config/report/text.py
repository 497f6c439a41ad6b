"""What a configuration would run, for a person at a terminal; nothing of it is built."""

from __future__ import annotations

from modelzoo_trainer.config.plan import TrainerPlan
from modelzoo_trainer.config.report.components import component_lines
from modelzoo_trainer.config.report.run import run_lines
from modelzoo_trainer.config.report.schedules import schedule_lines
from modelzoo_trainer.config.report.steps import length_lines


def report(plan: TrainerPlan) -> str:
    """Return what a trainer would run: plain text in sections, without a newline at the end.

    Neither a model nor a backend is made, nor anything of the user's.

    Args:
        plan: One trainer, checked.
    """
    sections = {
        "What runs": run_lines(plan),
        "Components": component_lines(plan),
        "Length": length_lines(plan),
        "Schedules": schedule_lines(plan),
        "Notes": [f"  {line}".rstrip() for note in plan.notes for line in _lines(str(note))],
    }
    return "\n\n".join("\n".join([title, *lines]) for title, lines in sections.items() if lines)


def _lines(note: str) -> list[str]:
    """Return the lines of a note: nearly always one, otherwise the others as a block below it."""
    first, *others = note.rstrip().splitlines()
    return [first, *(f"    {line}" for line in others)]
