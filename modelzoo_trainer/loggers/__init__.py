"""The loggers: callbacks that receive metrics.

`__all__` is the registry of the classes that a YAML file may use under `loggers`. Their modules are
imported when they are first used.
"""

from typing import TYPE_CHECKING, Final

from modelzoo_trainer.base.exports import lazy_exports

if TYPE_CHECKING:
    from modelzoo_trainer.hooks.logger import Logger as Logger
    from modelzoo_trainer.loggers.csv_logger import CSVLogger
    from modelzoo_trainer.loggers.jsonl import JsonlLogger
    from modelzoo_trainer.loggers.mlflow_logger import MLflowLogger
    from modelzoo_trainer.loggers.progress import ProgressLogger
    from modelzoo_trainer.loggers.telemetry import TelemetryLogger
    from modelzoo_trainer.loggers.tensorboard import TensorBoardLogger
    from modelzoo_trainer.loggers.wandb_logger import WandbLogger

_HOMES: Final = {
    "hooks.logger": ("Logger",),
    "loggers.csv_logger": ("CSVLogger",),
    "loggers.jsonl": ("JsonlLogger",),
    "loggers.mlflow_logger": ("MLflowLogger",),
    "loggers.progress": ("ProgressLogger",),
    "loggers.telemetry": ("TelemetryLogger",),
    "loggers.tensorboard": ("TensorBoardLogger",),
    "loggers.wandb_logger": ("WandbLogger",),
}

__all__ = [
    "CSVLogger",
    "JsonlLogger",
    "MLflowLogger",
    "ProgressLogger",
    "TelemetryLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "default_loggers",
]


def default_loggers() -> "list[Logger]":
    """Return new instances of the default loggers of a YAML file."""
    from modelzoo_trainer.loggers.jsonl import JsonlLogger
    from modelzoo_trainer.loggers.progress import ProgressLogger

    console = ProgressLogger()
    console.is_default = True
    return [JsonlLogger(), console]


if not TYPE_CHECKING:  # else a checker would accept any name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
