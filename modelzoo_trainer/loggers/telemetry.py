"""A logger of the format that has nothing to send to here."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from typing_extensions import override

from modelzoo_trainer.callback import Metrics
from modelzoo_trainer.constraints import PositiveInt, checked
from modelzoo_trainer.loggers.logger import Logger

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.telemetry")


class TelemetryLogger(Logger):
    """Takes the metrics that are meant for it alone, and sends them nowhere.

    In the format's own surroundings they go to the operator of a cluster, which there is none of
    here; the run says so once. Metrics without a destination do not reach it.

    Args:
        max_buffer_size: Accepted for the format's sake, > 0; without meaning here.
        max_buffer_seconds: Likewise.

    Raises:
        ConfigError: If a value is not a whole number > 0.
    """

    @checked()
    def __init__(
        self, max_buffer_size: PositiveInt = 128, max_buffer_seconds: PositiveInt = 150
    ) -> None:
        self.max_buffer_size = max_buffer_size
        self.max_buffer_seconds = max_buffer_seconds

    @override
    def setup(self, trainer: Trainer) -> None:
        trainer.remove_logger_destination(self.name)
        if trainer.backend.comm.is_main:
            log.info("TelemetryLogger: there is no cluster to send telemetry to; it is dropped.")

    @override
    def log_metrics(self, metrics: Metrics, step: int) -> None:
        """Drop them."""
