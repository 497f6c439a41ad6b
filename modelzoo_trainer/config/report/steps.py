"""The length of a run as lines: its steps, and what happens at which, with hints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from modelzoo_trainer.callbacks import KeepNCheckpoints
from modelzoo_trainer.config.components import Component
from modelzoo_trainer.config.plan import TrainerPlan
from modelzoo_trainer.config.report.flags import micro_batch_sizes
from modelzoo_trainer.config.report.hooks import listens
from modelzoo_trainer.config.report.length import RunLength
from modelzoo_trainer.config.report.values import row, show


def length_lines(plan: TrainerPlan) -> list[str]:
    """Return lines on how long the run is, with hints at what never happens.

    Args:
        plan: One trainer.
    """
    if plan.method is None:
        return []
    length = RunLength.of(plan)
    if plan.method != "fit":
        return row("validations", _passes(plan, length)) + _micro_batches(plan)
    return [
        *row("steps", _steps(plan, length)),
        *_micro_batches(plan),
        *row("validations", _validations(plan, length)),
        *row("checkpoints", _checkpoints(plan, length)),
        *row("log lines", length.log_lines.describe(_counted(length))),
        *(line for hint in _hints(length) for line in row("hint", hint)),
    ]


def _counted(length: RunLength) -> int | None:
    """Return the last step of a run that has all steps from 1 up to it."""
    return length.end if length.counts_from_0 else None


# ---- steps


def _steps(plan: TrainerPlan, length: RunLength) -> str:
    loop = length.loop
    if loop.num_steps is not None:
        num = str(loop.num_steps) if length.is_at_step_0 else f"{loop.num_steps} more"
    elif loop.num_epochs is not None:
        num = _epochs(length)
    else:
        num = str(loop.max_steps)
        num += "" if length.is_at_step_0 else ", those before the checkpoint counted"
    limit = "" if loop.max_time is None else f"; at most {loop.max_time!r} of time"
    return f"{num}; each of {_batches(plan, loop.grad_accum_steps)}{limit}"


def _epochs(length: RunLength) -> str:
    num, each = length.loop.num_epochs, length.loop.steps_per_epoch
    passes = "one pass" if num == 1 else f"{num} passes"
    text = f"{passes} over the data; the number of steps depends on it"
    if each is not None:
        text += f", at most {each} a pass"
    return text if length.bound is None else f"{text}, at most {length.bound} in all"


def _batches(plan: TrainerPlan, num: int) -> str:
    size = _batch_size(plan, "train_dataloader")
    batches = "1 batch" if num == 1 else f"{num} batches"
    if size is None:
        return batches
    total = "" if num == 1 else f": {num * size}"
    return f"{batches} of {_samples(size)}{total}"


def _batch_size(plan: TrainerPlan, key: str) -> int | None:
    """Return the argument `batch_size` of a dataloader, if it is one and has one."""
    dataloader = plan.call.get(key)
    given = dataloader.arguments if isinstance(dataloader, Component) else {}
    size = given.get("batch_size")
    return size if isinstance(size, int) else None


def _samples(num: int) -> str:
    return "1 sample" if num == 1 else f"{num} samples"


def _parts(size: int, plan: TrainerPlan, key: str) -> str:
    text = f"at most {_samples(size)} at once"
    batch = _batch_size(plan, key)
    if batch is None:
        return text
    num = math.ceil(batch / size)
    return f"{text}; a batch of {batch} in {num} part{'s' * (num > 1)}"


def _micro_batches(plan: TrainerPlan) -> list[str]:
    """Return lines on micro-batches, of what the plan runs."""
    sizes = micro_batch_sizes(plan)
    of = (
        ("train_dataloader", "training", sizes.train),
        (_val_key(plan), "validation", sizes.validate),
    )
    return [
        line
        for key, what, size in of
        if size is not None and plan.call.get(key)
        for line in row("micro-batches", f"{what}: {_parts(size, plan, key)}")
    ]


# ---- validations


def _val_key(plan: TrainerPlan) -> str:
    return "val_dataloaders" if plan.method == "validate_all" else "val_dataloader"


def _passes(plan: TrainerPlan, length: RunLength) -> str:
    """Return what one validation, or one after the other, runs over."""
    given = plan.call.get(_val_key(plan))
    loaders = given if isinstance(given, list) else [] if given is None else [given]
    batches = length.loop.eval_steps
    each = "all batches" if batches is None else f"{batches} batch{'es' * (batches > 1)}"
    if not loaders:
        return f"no {_val_key(plan)}{_by_callbacks(plan)}"
    of = f"of {len(loaders)} dataloaders each" if len(loaders) > 1 else "of one dataloader"
    paths = plan.call.get("ckpt_paths")
    times = f", of each of {len(paths)} checkpoints or patterns" if isinstance(paths, list) else ""
    return f"{each} {of}{times}"


def _by_callbacks(plan: TrainerPlan) -> str:
    own = [one.target for one in plan.init.get("callbacks", ())]
    own += [type(one) for one in plan.defaults.get("callbacks", ())]
    names = [one.__name__ for one in own if listens(one, "run_validation")]
    return f"; only what callbacks run: {', '.join(names)}" if names else ""


def _validations(plan: TrainerPlan, length: RunLength) -> str:
    if plan.mode == "train":
        return "none (mode train)"
    frequency = length.loop.eval_frequency
    if not frequency and length.evaluates_every is None:
        return f"none (eval_frequency: {show(frequency)})"
    if not plan.call.get("val_dataloader") and not _by_callbacks(plan):
        return "none (no val_dataloader)"
    where = length.validations
    if where is None:
        assert frequency  # of a run whose length is not known
        when = f"after each {frequency * 100:g}% of the steps, and at the end"
    else:
        when = where.describe(_counted(length))
    return f"{when}; {_passes(plan, length)}"


# ---- checkpoints


def _checkpoints(plan: TrainerPlan, length: RunLength) -> str:
    where = length.checkpoints
    if where is None:
        return "the initial one alone (no steps)" if length.has_initial_checkpoint else "none"
    kept = [
        component.arguments["n"]
        for component in plan.init.get("callbacks", ())
        if component.target is KeepNCheckpoints and component.arguments.get("n") is not None
    ]
    num = min(kept, default=0)
    rest = f"; the newest {num} are kept" if num > 1 else "; only the newest is kept"
    rest = rest if kept else ""
    # Of those by the clock or the data the number is not known.
    end = None if length.checkpoint.steps is None else _counted(length)
    return f"{where.describe(end)}{_more_times(length)}{rest}"


def _more_times(length: RunLength) -> str:
    """Return the times of checkpoints that are no multiples of steps."""
    times = length.checkpoint.times
    more = ""
    if times.minutes is not None:
        more += f"; {times.minutes:g} minutes after the last one"
    if times.epochs is not None:
        passes = "pass" if times.epochs == 1 else f"{times.epochs} passes"
        more += f"; after every {passes} over the data"
    if length.checkpoint.asynchronous:
        more += "; written while training goes on"
    return more


# ---- what has no effect, or another one than meant


def _hints(length: RunLength) -> Iterator[str]:
    bound = length.bound
    steps: dict[str, Any] = {
        "checkpoint.steps": length.checkpoint.steps,
        "logging.log_steps": length.logging.log_steps,
    }
    frequency = length.loop.eval_frequency
    if isinstance(frequency, int):
        steps = {"loop.eval_frequency": frequency, **steps}
        if frequency == 1 and bound != 1:
            yield "loop.eval_frequency: 1 validates after every step; 1.0 is once, at the end"
    for name, every in steps.items():
        if every is not None and bound is not None and every > bound:
            few = bound if bound == length.end else f"at most {bound}"
            yield f"{name} is {every}, the run has {few} steps: it happens at the end alone"
    if length.checkpoint.save_initial_checkpoint and not length.has_initial_checkpoint:
        yield "checkpoint.save_initial_checkpoint: none is written, as the run begins from one"
