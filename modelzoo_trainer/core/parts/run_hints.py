"""Hints about a fit, such as a schedule that ends long before it, or a metric logged only once."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from modelzoo_trainer.base.devices import faster_than
from modelzoo_trainer.core.parts.watched_metrics import watch_hints
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.preview import schedule_hints, unused_rate_hint
from modelzoo_trainer.optim.scheduler import Scheduler

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.schedulers")

_DEFAULT_RATE = 1e-3  # of the optimizers of this package


def hints_of(trainer: Trainer, val_dataloader: Any) -> tuple[str, ...]:
    """Return the hints about a fit, as `modelzoo-trainer check` prints them."""
    faster = faster_than(trainer.backend, product_dtype(trainer))
    of_speed = (faster,) if faster else ()
    return (*of_speed, *_of_schedules(trainer), *watch_hints(trainer, val_dataloader))


def product_dtype(trainer: Trainer) -> torch.dtype:
    """Return the dtype of most matrix products of a model."""
    if trainer.precision.dtype is not None:
        return trainer.precision.dtype
    sizes: Counter[torch.dtype] = Counter()
    for param in trainer.model.parameters():
        sizes[param.dtype] += 0 if is_lazy(param) else param.numel()
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def _of_schedules(trainer: Trainer) -> tuple[str, ...]:
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
            rate = _given_rate(schedule.optimizer)
            hints = [*schedule_hints(schedule, end, first)]
            hints += () if rate is None else unused_rate_hint(schedule, rate)
            yield from (f"{type(schedule).__name__}: {hint}" for hint in hints)
        elif trainer.manual_steps is None and isinstance(schedule, torch_schedulers.LRScheduler):
            yield from _torch_hints(schedule, _num_steps_in_all(trainer, schedule, end))


def _given_rate(optimizer: Optimizer | None) -> float | None:
    """Return the learning rate that an optimizer was created with; None if it is the default."""
    if optimizer is None:
        return None
    given = optimizer.defaults.get("lr")
    parameters = inspect.signature(type(optimizer)).parameters
    default = parameters["lr"].default if "lr" in parameters else None
    default = _DEFAULT_RATE if default is None else default
    return given if isinstance(given, float) and given != default else None


def _num_steps_in_all(trainer: Trainer, schedule: Any, end: int) -> int:
    """Return how many steps a scheduler of torch has taken when `global_step` is `end`."""
    num: int = schedule.last_epoch + end - trainer.global_step
    return num


def _torch_hints(schedule: Any, end: int) -> Iterator[str]:
    """Yield hints about a scheduler of torch that takes `end` steps in all."""
    kind = type(schedule).__name__
    if isinstance(schedule, torch_schedulers.CosineAnnealingLR) and schedule.T_max != end:
        ends = "increases again after it" if schedule.T_max < end else "stays above its minimum"
        yield (
            f"{kind}: T_max is {schedule.T_max}, the run has {end} steps: the learning rate {ends}"
        )
    if isinstance(schedule, torch_schedulers.OneCycleLR) and schedule.total_steps > end:
        yield (
            f"{kind}: total_steps is {schedule.total_steps}, the run has {end} steps: the "
            f"learning rate stays above its minimum"
        )


def refuse_short(trainer: Trainer) -> None:
    """Check that torch's `OneCycleLR`, which raises after its last step, is long enough.

    Raises:
        ConfigError: If one is shorter than the run.
    """
    end = trainer.schedule.total_steps
    if end is None or trainer.manual_steps is not None:
        return
    for schedule in trainer.schedulers:
        if not isinstance(schedule, torch_schedulers.OneCycleLR):
            continue
        num = _num_steps_in_all(trainer, schedule, end)
        if num > schedule.total_steps:
            raise ConfigError(
                f"schedulers: OneCycleLR.total_steps is {schedule.total_steps}, but the run takes "
                f"{num} steps, and torch's OneCycleLR raises an error after total_steps. Set "
                f"total_steps={num}."
            )


def log_hints(trainer: Trainer, val_dataloader: Any) -> None:
    """Log the hints as warnings, unless a progress callback shows them at the start."""
    if not trainer.backend.comm.is_main:
        return
    shows = [getattr(callback, "shows_hints", False) for callback in trainer.all_callbacks]
    if trainer.progress == "none" or not any(shows):
        for hint in hints_of(trainer, val_dataloader):
            log.warning("%s", hint)
