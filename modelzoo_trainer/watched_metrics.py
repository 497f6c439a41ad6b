"""Hints about callbacks that watch a validation metric which is logged once or never."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_VALIDATION: Final = re.compile(r"(?:^|/)validate_\d+/")


def watch_hints(trainer: Trainer, val_dataloader: Any) -> Iterator[str]:
    """Yield the hints about the callbacks of a fit that is about to start.

    A callback that has a best value already, of an earlier fit, is not among them.
    """
    validates = val_dataloader is not None or bool(trainer.validation_callbacks)
    loop, schedule = trainer.schedule.loop, trainer.schedule
    total, num_steps = schedule.total_steps, None
    if total is not None:
        num_steps = total - schedule.origin_step
    watching = [(type(one), one.metric) for one in trainer.all_callbacks if _lacks_best(one)]
    if loop is None or not watching:
        return
    num = num_validations(loop, num_steps, schedule.validates_every) if validates else 0
    if num is not None:
        yield from hints_for(watching, loop, num, num_steps, schedule.steps_per_epoch)


def _lacks_best(callback: Any) -> bool:
    """Return whether a callback watches a metric and has no best value yet."""
    return hasattr(type(callback), "with_one_value") and not callback.best


def num_validations(loop: Any, num_steps: int | None, every: int | None) -> int | None:
    """Return the number of validations of a fit; None = unknown, or more than one.

    Args:
        loop: Its `TrainingLoop`.
        num_steps: Its steps; None = unknown.
        every: Steps between two validations; None = unknown, or there is only one.
    """
    if not loop.eval_frequency:
        return 0
    if isinstance(loop.eval_frequency, str):  # "epoch"
        is_one = loop.num_epochs == 1
    else:
        is_one = loop.eval_frequency == 1.0 and isinstance(loop.eval_frequency, float)
    is_short = every is not None and num_steps is not None and num_steps <= every
    return 1 if is_one or is_short else None


def hints_for(
    watching: Iterable[tuple[type, str]],
    loop: Any,
    num: int,
    num_steps: int | None,
    steps_per_epoch: int | None,
) -> Iterator[str]:
    """Yield hints about callbacks, given as class and metric, of a fit with 0 or 1 validations."""
    is_one_epoch = loop.num_epochs == 1 or (
        num_steps is not None and steps_per_epoch is not None and num_steps <= steps_per_epoch
    )
    often = "a smaller number of steps" if is_one_epoch else '"epoch"'
    advice = f"Validate more often: set loop.eval_frequency to {often}"
    if num == 0:
        advice = f"Set loop.eval_frequency to {often}"
    if num == 0 and loop.eval_frequency:
        advice = "Pass val_dataloader to fit (fit.val_dataloader in YAML)"
    for kind, metric in watching:
        if not _VALIDATION.search(metric):
            continue
        if num:
            effect = getattr(kind, "with_one_value", "")
            yield (
                f"{kind.__name__}: {metric} is logged only once, at the end of the run, so "
                f"{effect}. {advice}"
            )
        else:
            yield f"{kind.__name__}: no effect, as no validation logs {metric}. {advice}"
