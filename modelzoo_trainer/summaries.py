"""Metrics from anywhere in a run, such as a model's forward.

On its own: what keeps a compiler away brings the compiler along, which takes a second to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modelzoo_trainer.closures import active_trainer, is_recorded, snapshot

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


# A compiler would make the trainer's state part of the graph.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
def summarize_scalar(name: str, value: Tensor | float) -> None:
    """Log a number under a name, on log steps of the run that is under way.

    Outside of a run nothing happens, so a model may call it wherever it is used. The value is
    taken as it is now and reaches the loggers as any metric does, in a validation with its prefix.
    Of a step over several batches it is that of the last batch. When a name is used again in one
    training batch, as by a module that is called twice, the first value counts; of a validation
    the last logged batch does.

    Args:
        name: Of the metric.
        value: A number, or a tensor with one element.

    Raises:
        ValueError: In a run, if it is neither.

    Cost:
        Off log steps nothing. In a compiled model the graph is split here.
    """
    trainer = active_trainer()
    if trainer is None:
        return
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"summarize_scalar: {name!r} has the shape {tuple(value.shape)}; it must have one "
                f"element. Use summarize_tensor for more."
            )
        if is_recorded(trainer):
            _log(trainer, name, snapshot(value).reshape(()))
    elif isinstance(value, (int, float)):
        _log(trainer, name, value)
    else:
        raise ValueError(
            f"summarize_scalar: {name!r} is a {type(value).__name__}; it must be a number or a "
            f"tensor with one element."
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
def summarize_tensor(name: str, value: Tensor) -> None:
    """Log a whole tensor under a name; otherwise as `summarize_scalar`.

    Args:
        name: Of the metric.
        value: One without dimensions is logged with one.

    Raises:
        ValueError: In a run, if it is no tensor.

    Cost:
        Off log steps nothing; on those, a copy of the tensor to the host.
    """
    trainer = active_trainer()
    if trainer is None:
        return
    if not isinstance(value, Tensor):
        raise ValueError(
            f"summarize_tensor: {name!r} is a {type(value).__name__}; it must be a tensor. Use "
            f"summarize_scalar for numbers."
        )
    if is_recorded(trainer):
        _log(trainer, name, snapshot(value if value.dim() else value.reshape(1)))


def _log(trainer: Trainer, name: str, value: Tensor | float) -> None:
    scoped = trainer.name_scope_path + name
    if not (trainer.logging.in_batch and scoped in trainer.logging.collected):
        trainer.log_metrics_dict({name: value})
