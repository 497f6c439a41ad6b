"""Hints about callbacks that watch a validation metric which is logged once or never."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_PACKAGE: Final = __name__.partition(".")[0]
_VALIDATION: Final = re.compile(r"(?:^|/)validate_\d+/")


def watch_hints(trainer: Trainer, val_dataloader: Any) -> Iterator[str]:
    """Yield the hints about the callbacks of a fit that is about to start.

    A callback that has a best value already, of an earlier fit, is not among them. No hints if
    there is a callback of the user, which may validate by itself.
    """
    validates = val_dataloader is not None or bool(trainer.validation_callbacks)
    loop, schedule = trainer.schedule.loop, trainer.schedule
    callbacks = [getattr(one, "__wrapped__", one) for one in trainer.all_callbacks]
    watching = [(type(one), one.metric) for one in callbacks if _lacks_best(one)]
    if loop is None or not watching or not are_shipped(map(type, callbacks)):
        return
    begin, end = schedule.origin_step, schedule.total_steps
    num: int | None = 0
    if validates:
        is_whole = trainer.data.is_between_epochs
        num = num_validations(
            loop, schedule.validates_every, begin=begin, end=end, is_between_epochs=is_whole
        )
    if num is not None:
        num_steps = None if end is None else end - begin
        yield from hints_for(watching, loop, num, num_steps, schedule.steps_per_epoch)


def are_shipped(kinds: Iterable[Any]) -> bool:
    """Return whether all of these classes of callbacks are part of this package."""
    return all(getattr(kind, "__module__", "").partition(".")[0] == _PACKAGE for kind in kinds)


def is_for_several_fits(kind: Any, reset_on_fit: Any) -> bool:
    """Return whether a callback keeps its state from fit to fit although it does not by default."""
    parameter = inspect.signature(kind).parameters.get("reset_on_fit")
    return parameter is not None and parameter.default is True and reset_on_fit is False


def _lacks_best(callback: Any) -> bool:
    """Return whether a callback watches a metric, in one fit, and has no best value yet."""
    kind = type(callback)
    if not hasattr(kind, "with_one_value") or is_for_several_fits(kind, callback.reset_on_fit):
        return False
    return callback.best is None or callback.best == []


def num_validations(
    loop: Any,
    every: int | None,
    *,
    begin: int = 0,
    end: int | None,
    is_between_epochs: bool = True,
) -> int | None:
    """Return the number of validations of a fit; None = unknown, or more than one.

    Args:
        loop: Its `TrainingLoop`.
        every: Steps between two validations; None = unknown, or there is only one.
        begin: The `global_step` at its start.
        end: The `global_step` at its end; None = unknown.
        is_between_epochs: Whether it starts at the beginning of an epoch.
    """
    if not loop.eval_frequency:
        return 0
    if isinstance(loop.eval_frequency, str):  # "epoch"
        is_short = every is not None and end is not None and end - begin <= every
        return 1 if is_between_epochs and (loop.num_epochs == 1 or is_short) else None
    if loop.eval_frequency == 1.0 and isinstance(loop.eval_frequency, float):
        return 1
    if every is None or end is None:
        return None
    num = -(-end // every) - begin // every  # at the multiples of `every`, and at the end
    return 1 if num <= 1 else None


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
                f"{kind.__name__}: {metric} is logged only once in this fit, at its end, so within "
                f"it {effect}. {advice}"
            )
        else:
            yield f"{kind.__name__}: no effect, as no validation logs {metric}. {advice}"
