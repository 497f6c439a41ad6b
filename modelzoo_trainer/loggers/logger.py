"""What a logger is: a callback that receives metrics."""

from abc import ABC, abstractmethod

from modelzoo_trainer.callback import Callback, Metrics


class Logger(Callback, ABC):
    """A callback that receives every metric that is logged."""

    @property
    def name(self) -> str:
        """What it is called as a destination of metrics."""
        return type(self).__name__

    @abstractmethod
    def log_metrics(self, metrics: Metrics, step: int) -> None:
        """Take metrics.

        Args:
            metrics: Names, with their scopes, and host values: numbers, CPU tensors, strings.
                Belongs to all loggers: leave it as it is.
            step: The `global_step` that they belong to.
        """

    def flush(self) -> None:
        """Write what is still in memory."""
