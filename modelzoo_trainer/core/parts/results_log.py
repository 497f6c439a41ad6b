"""The results of validations as lines of the log."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

quiet_log = logging.getLogger("modelzoo_trainer.results")
"""Goes only to run.log, if `progress` is "none"."""

_VALIDATION: Final = re.compile(r"((?:.+/)?(?:validate_\d+|test))/(.+)")


def scopes_of(trainer: Trainer) -> frozenset[str]:
    """Return the name scopes of custom validations."""
    return frozenset(callback.name_scope for callback in trainer.validation_callbacks)


def log_results(
    log: logging.Logger, metrics: dict[str, Any], step: int, scopes: Collection[str] = ()
) -> None:
    """Log a line for each validation that has results among metrics."""
    for scope, results in _by_scope(metrics, scopes).items():
        names = sorted(results, key=lambda name: name != "loss")
        shown = ", ".join(f"{name} {number(results[name])}" for name in names)
        log.info("%s: %s at step %d", scope, shown, step)


def _by_scope(metrics: dict[str, Any], scopes: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the validation results among metrics by scope, without tensors."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in metrics.items():
        match = _VALIDATION.fullmatch(name)
        scope, _, rest = name.partition("/")
        if isinstance(value, Tensor) and value.numel() > 1:
            continue
        if match is not None:
            found.setdefault(match[1], {})[match[2]] = value
        elif rest and scope in scopes:
            found.setdefault(scope, {})[rest] = value
    return found


def number(value: Any) -> str:
    """Format a metric, numbers with five decimals or digits."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.5f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.5g}"
