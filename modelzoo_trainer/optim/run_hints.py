"""Hints about the schedules of a fit, such as one that ends long before the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from modelzoo_trainer.optim.preview import schedule_hints
from modelzoo_trainer.optim.scheduler import Scheduler

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.schedulers")


def hints_of(trainer: Trainer) -> tuple[str, ...]:
    """Return the hints about the schedules of a fit, as `--check` prints them."""
    try:
        return tuple(_found(trainer))
    except Exception as error:  # a function of the user's, asked for a step that it never gets
        log.debug("failed to preview the schedules: %s", error, exc_info=error)
        return ()


def _found(trainer: Trainer) -> Iterator[str]:
    end = trainer.schedule.total_steps
    if end is None or end <= trainer.global_step:
        return
    for schedule in trainer.schedulers:
        if isinstance(schedule, Scheduler):
            first = schedule.last_step - trainer.global_step
            for hint in schedule_hints(schedule, end, first):
                yield f"{type(schedule).__name__}: {hint}"


def log_hints(trainer: Trainer) -> None:
    """Log the hints as warnings, unless a progress callback shows them at the start."""
    if not trainer.backend.comm.is_main:
        return
    shows = (getattr(callback, "shows_hints", False) for callback in trainer.all_callbacks)
    if trainer.progress == "none" or not any(shows):
        for hint in hints_of(trainer):
            log.warning("%s", hint)
