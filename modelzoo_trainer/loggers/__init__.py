"""The loggers: callbacks that receive metrics.

`__all__` is the registry of the classes that a YAML file may use under `loggers`.
"""

from modelzoo_trainer.loggers.csv_logger import CSVLogger
from modelzoo_trainer.loggers.jsonl import JsonlLogger
from modelzoo_trainer.loggers.logger import Logger as Logger
from modelzoo_trainer.loggers.mlflow_logger import MLflowLogger
from modelzoo_trainer.loggers.progress import ProgressLogger
from modelzoo_trainer.loggers.telemetry import TelemetryLogger
from modelzoo_trainer.loggers.tensorboard import TensorBoardLogger
from modelzoo_trainer.loggers.wandb_logger import WandbLogger

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


def default_loggers() -> list[Logger]:
    """Return new instances of the default loggers of a YAML file."""
    console = ProgressLogger()
    console.is_default = True
    return [JsonlLogger(), console]
