"""A logger for compatibility, which drops its metrics."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from typing_extensions import override

from modelzoo_trainer.base.constraints import PositiveInt, checked_dataclass
from modelzoo_trainer.callback import Metrics
from modelzoo_trainer.hooks.logger import Logger

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.telemetry")


@checked_dataclass
class TelemetryLogger(Logger):
    """Drop metrics that are logged with this logger as `dest`.

    In the original they go to the operator of a cluster, which does not exist here; this is logged
    once. Metrics without a destination do not reach it.

    Args:
        max_buffer_size: Accepted for compatibility, > 0; no effect.
        max_buffer_seconds: Accepted for compatibility, > 0; no effect.

    Raises:
        ConfigError: If a value is not a positive integer.
    """

    max_buffer_size: PositiveInt = 128
    max_buffer_seconds: PositiveInt = 150

    @override
    def setup(self, trainer: Trainer) -> None:
        trainer.remove_logger_destination(self.name)
        if trainer.backend.comm.is_main:
            log.info("TelemetryLogger drops its metrics: it is accepted only for compatibility.")

    @override
    def log_metrics(self, metrics: Metrics, step: int) -> None:
        """Drop the metrics."""
