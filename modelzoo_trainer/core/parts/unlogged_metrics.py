"""Hints if a model returns metrics in a validation that are not logged."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from modelzoo_trainer.base.metric_direction import direction_of
from modelzoo_trainer.callback import Callback, Outputs

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.model")

_NOT_METRICS: Final = ("loss", "num_items")
_READERS: Final = ("on_after_forward", "on_validate_step_end", "on_validate_batch_end")
"""Hooks that get the model's output."""
_PACKAGE: Final = __name__.partition(".")[0]
_MOST: Final = 4  # names in the message


def metrics_among(outputs: Outputs) -> tuple[str, ...]:
    """Return the names of a model's outputs that `ModelEvalMetrics` would average."""
    return tuple(
        name
        for name, value in outputs.items()
        if name not in _NOT_METRICS and isinstance(value, Tensor) and not value.dim()
    )


def not_scalar_tensors(outputs: Outputs) -> dict[str, str]:
    """Return the outputs that look like metrics but are not scalar tensors, with what they are.

    These are tensors with dimensions and integers that are named like a metric, and other numbers.
    """
    return {
        name: f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        for name, value in outputs.items()
        if name not in _NOT_METRICS and isinstance(name, str) and _looks_like_metric(name, value)
    }


def _looks_like_metric(name: str, value: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(value.dim()) and direction_of(name) is not None
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    return not isinstance(value, int) or direction_of(name) is not None


def hint_at_not_scalar(trainer: Trainer, found: Mapping[str, str]) -> bool:
    """Log which metrics of a validation are not scalar tensors; return whether there are any.

    Numbers that are not named like a metric may be settings. No hint if a callback of the user
    reads the model's output.
    """
    found = {name: what for name, what in found.items() if direction_of(name) is not None}
    if not found or any(map(_reads_outputs, trainer.all_callbacks)):
        return False
    log.info(
        "Not logged, because a metric must be a scalar tensor: %s, which the model returned in a "
        "validation. %s",
        ", ".join(f"{name} ({what})" for name, what in list(found.items())[:_MOST]),
        " ".join(dict.fromkeys(map(_advice, found.values()))),
    )
    return True


def _advice(what: str) -> str:
    if what.startswith("shape"):
        return "Check the shapes that the metric is computed from, or return its mean()."
    return (
        "Return a scalar tensor: omit .item() or float(), or wrap the number in torch.tensor(...)."
    )


def why_not_logged(what: str | None) -> str:
    """Return why a metric that the model returns is not logged, and what to do.

    Args:
        what: What it is instead of a scalar tensor; None = it is one.
    """
    if what is None:
        return "The model returns it, but nothing logs it: add the callback ModelEvalMetrics()."
    return f"The model returns it, but not as a scalar tensor ({what}). {_advice(what)}"


def hint_at_unlogged(trainer: Trainer, names: Iterable[str], scope: str) -> bool:
    """Log which metrics of a validation are not logged; return whether there are any.

    No hint if a callback of the user reads the model's output.

    Args:
        trainer: The trainer.
        names: What the model returned but nothing logged.
        scope: The prefix of the dataloader.
    """
    missing = list(names)
    if not missing or any(map(_reads_outputs, trainer.all_callbacks)):
        return False
    more = f" and {len(missing) - _MOST} more" if len(missing) > _MOST else ""
    log.info(
        "Not logged: %s%s, which the model returned in a validation. Add the callback "
        "ModelEvalMetrics() to log the mean as %s%s.",
        ", ".join(missing[:_MOST]),
        more,
        scope,
        missing[0],
    )
    return True


def _reads_outputs(callback: Any) -> bool:
    kind = type(getattr(callback, "__wrapped__", callback))
    if kind.__module__.partition(".")[0] == _PACKAGE:
        return False
    return any(
        getattr(kind, name, None) not in (None, getattr(Callback, name)) for name in _READERS
    )
