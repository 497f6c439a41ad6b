"""Metrics from anywhere in a run, such as a model's forward.

In its own module, since disabling the compiler imports it, which takes a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modelzoo_trainer.core.parts.closures import active_trainer, is_recorded, snapshot

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


# The compiler would make the trainer's state part of the graph.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def summarize_scalar(name: str, value: Tensor | float) -> None:
    """Log a number under a name, on log steps of the active run.

    Outside a run this is a no-op, so a model may always call it. The current value is passed to the
    loggers like any metric; in a validation, with its prefix. With `grad_accum_steps`, the value of
    the last batch of a step is logged, not the mean. If a name is used repeatedly in one training
    batch, as by a module that is called twice, the first value is logged; in a validation, the
    value of the last logged batch.

    Args:
        name: Name of the metric.
        value: A number, or a tensor with one element.

    Raises:
        ValueError: In a run, if it is neither.

    Cost:
        None off log steps. In a compiled model, a graph break.
    """
    trainer = active_trainer()
    if trainer is None:
        return
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"summarize_scalar: {name!r} has the shape {tuple(value.shape)}; it must have one "
                f"element. Use summarize_tensor for other shapes."
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


@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def summarize_tensor(name: str, value: Tensor) -> None:
    """Log a whole tensor under a name; otherwise as `summarize_scalar`.

    Args:
        name: Name of the metric.
        value: A scalar tensor is logged with one dimension.

    Raises:
        ValueError: In a run, if it is not a tensor.

    Cost:
        None off log steps; on log steps, a copy of the tensor to the host.
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
