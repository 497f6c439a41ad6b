"""The results of validations as lines of the log."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, Metrics
from modelzoo_trainer.console.bar import number

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

quiet_log = logging.getLogger("modelzoo_trainer.results")
"""Goes only to run.log, if `progress` is "none"."""

_VALIDATION: Final = re.compile(r"((?:.+/)?(?:validate_\d+|test))/(.+)")


class ResultsInRunLog(CoreCallback):
    """Write the results of validations to `run.log` if nothing shows the progress of the run."""

    @override
    def on_metrics(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        is_of_training = trainer.is_fitting and "loss" in metrics
        if not is_of_training and trainer.backend.comm.is_main:
            log_results(quiet_log, metrics, step, scopes_of(trainer))


def scopes_of(trainer: Trainer) -> frozenset[str]:
    """Return the name scopes of custom validations."""
    return frozenset(callback.name_scope for callback in trainer.validation_callbacks)


def log_results(
    log: logging.Logger, metrics: Metrics, step: int, scopes: Collection[str] = ()
) -> None:
    """Log a line for each validation that has results among metrics."""
    for scope, results in _by_scope(metrics, scopes).items():
        names = sorted(results, key=lambda name: name != "loss")
        shown = ", ".join(f"{name} {number(results[name])}" for name in names)
        log.info("%s: %s at step %d", scope, shown, step)


def _by_scope(metrics: Metrics, scopes: Collection[str]) -> dict[str, Metrics]:
    """Return the validation results among metrics by scope, without tensors."""
    found: dict[str, Metrics] = {}
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
