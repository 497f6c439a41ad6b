"""Print what a configuration would run; nothing is built."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Final

from modelzoo_trainer.checkpointing.stores.urls import is_url
from modelzoo_trainer.config.components import Component
from modelzoo_trainer.config.plan import METHODS, TrainerPlan
from modelzoo_trainer.config.printout.components import (
    LABEL,
    argument_lines,
    component_lines,
    plain,
    row,
    show,
)
from modelzoo_trainer.config.printout.length import RunLength, length_lines
from modelzoo_trainer.config.printout.schedules import schedule_lines
from modelzoo_trainer.core import Checkpoint
from modelzoo_trainer.errors import CheckpointError
from modelzoo_trainer.zoo.data.registry import PROCESSORS

_MODES: Final = {
    "train": "train, without validation (fit)",
    "train_and_eval": "train_and_eval (fit)",
    "eval": "eval (validate)",
    "eval_all": "eval_all (validate_all)",
    "test": "test",
    "predict": "predict",
    None: f"none; the file has none of {', '.join(METHODS)}",
}


def run_lines(plan: TrainerPlan) -> list[str]:
    """Return lines on what runs: mode, device, folder, seed, start."""
    init = plan.init
    lines = row("mode", _MODES[plan.mode])
    lines += row("device", init.get("device", "cpu (default)"))
    if init.get("backend"):
        lines += argument_lines(init["backend"], 2, f"{'options:':{LABEL}}")
    folder = _model_dir(plan)
    mark = "" if init.get("model_dir") is not None else " (default)"
    if folder is not None:
        lines += row("model_dir", f"{show(plain(folder))}{mark}")
    if init.get("call_model"):
        lines += row("call_model", init["call_model"])
    seed = init.get("seed")
    lines += row("seed", "none (default)" if seed is None else str(seed))
    if plan.method is not None:
        lines += row("start", _start(plan))
    return lines + (row("resuming", _resuming(plan)) if plan.method == "fit" else [])


def _model_dir(plan: TrainerPlan) -> str | Path | None:
    given: str | Path | None = plan.init.get("model_dir")
    if given is not None:
        return given
    parameter = inspect.signature(plan.trainer).parameters.get("model_dir")
    return None if parameter is None else parameter.default


def _root(plan: TrainerPlan, checkpoint: Checkpoint) -> tuple[str | Path | None, str]:
    """Return the folder of checkpoints, or its URL, and how to name it."""
    root = checkpoint.checkpoint_url or checkpoint.checkpoint_root
    if root is None:
        return _model_dir(plan), "model_dir"
    return root, show(plain(root))


def missing_weights(plan: TrainerPlan) -> str | None:
    """Return why the plan has no weights to validate, test or predict with; None if it has."""
    if plan.method in (None, "fit") or METHODS[plan.method].ckpt in plan.call:
        return None
    checkpoint = RunLength.of(plan).checkpoint
    if METHODS[plan.method].needs_weights and not checkpoint.autoload_last_checkpoint:
        return "autoload_last_checkpoint is false"
    return _no_checkpoint(checkpoint, *_root(plan, checkpoint))


def _start(plan: TrainerPlan) -> str:
    method = METHODS[plan.method or "fit"]
    key = method.ckpt
    given = plan.call.get(key, ...)
    if given is None:
        return f"new weights ({key}: null)"
    if given is not ...:
        return f"{show(plain(given))} ({key})"
    checkpoint = RunLength.of(plan).checkpoint
    _, folder = _root(plan, checkpoint)
    if plan.method == "validate_all":
        return f"each checkpoint in {folder}"
    if why := missing_weights(plan):
        return f"invalid: {why}, so {key} is required"
    if not checkpoint.autoload_last_checkpoint:
        return "new weights (autoload_last_checkpoint: false)"
    otherwise = " if there is one, else new weights" if plan.method == "fit" else ""
    return f"the newest checkpoint in {folder}{otherwise}"


def _resuming(plan: TrainerPlan) -> str:
    """Return whether resuming in the middle of an epoch is exact."""
    loader = plan.call.get("train_dataloader")
    target = loader.target if isinstance(loader, Component) else None
    place = f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', '')}"
    if place in PROCESSORS.values():
        return "exact, even mid-epoch; the number of workers and processes may change"
    return (
        "depends on the dataloader, which is not built here; the run warns before its first step "
        "if it cannot be exact"
    )


def _no_checkpoint(checkpoint: Checkpoint, place: str | Path | None, shown: str) -> str | None:
    """Return why there is no checkpoint to validate, or None if there seems to be one."""
    if place is None or is_url(place):  # not known without the network
        return None
    try:
        is_lacking = not checkpoint.is_any_in(Path(place))
    except CheckpointError as error:
        return str(error).rstrip(".")
    return f"no checkpoint in {shown}" if is_lacking else None


def report(plan: TrainerPlan) -> str:
    """Return what a trainer would run: plain text in sections, without a newline at the end.

    Neither a model nor a backend nor a class of the user is built.
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
    """Return the lines of a note; those after the first are indented."""
    first, *others = note.rstrip().splitlines()
    return [first, *(f"    {line}" for line in others)]
