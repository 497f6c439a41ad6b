"""The trainers whose runs are under way, and what of a step at hand is to be recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

    from modelzoo_trainer.trainer import Trainer

# Of the process, not of a thread: backward hooks run in threads of autograd's.
_ACTIVE: Final[list[Trainer]] = []


@contextmanager
def active(trainer: Trainer) -> Iterator[None]:
    """Have `active_trainer` return this trainer inside.

    Args:
        trainer: Its run begins.
    """
    _ACTIVE.append(trainer)
    try:
        yield
    finally:
        begun_last = next(idx for idx in reversed(range(len(_ACTIVE))) if _ACTIVE[idx] is trainer)
        del _ACTIVE[begun_last]


def active_trainer() -> Trainer | None:
    """Return the trainer whose run began last and is not over, or None."""
    return _ACTIVE[-1] if _ACTIVE else None


def is_recorded(trainer: Trainer) -> bool:
    """Return whether what is logged now is used: on log steps, and where those are rehearsed."""
    return trainer.is_log_step or (trainer.rehearses and trainer.should_run_optimizer_step)


def snapshot(tensor: Tensor) -> Tensor:
    """Return a copy that no later operation in place changes."""
    return tensor.detach().clone()
