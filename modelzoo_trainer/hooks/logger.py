"""The base class of loggers."""

from abc import ABC, abstractmethod

from modelzoo_trainer.callback import Callback, Metrics


class Logger(Callback, ABC):
    """Base class of callbacks that receive all logged metrics."""

    is_default: bool = False
    """Whether it was added by default; another callback that shows progress replaces it."""

    @property
    def name(self) -> str:
        """The name of the logger as a destination of metrics."""
        return type(self).__name__

    @abstractmethod
    def log_metrics(self, metrics: Metrics, step: int) -> None:
        """Receive metrics.

        Args:
            metrics: Names, with their scopes, and host values: numbers, CPU tensors, strings.
                Shared by all loggers: do not modify it.
            step: The `global_step` of the metrics.
        """

    def flush(self) -> None:
        """Write pending metrics."""
