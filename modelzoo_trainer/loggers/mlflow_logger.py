"""Metrics for MLflow."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.base.constraints import Name, checked_dataclass
from modelzoo_trainer.callback import Metrics
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loggers.service_logger import ServiceLogger

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.mlflow")

SEND_INTERVAL_S: Final = 1.0
_MOST_AT_ONCE: Final = 1000  # metrics in a request, a limit of MLflow
_LONGEST_TEXT: Final = 5000  # characters of a tag, a limit of MLflow
_UNFIT: Final = re.compile(r"[^\w\-. :/]")
_MOST_SETTINGS: Final = 100  # in a request, a limit of MLflow
_LONGEST_SETTING: Final = 500  # characters that every kind of store takes
_LONGEST_NAME: Final = 250


@checked_dataclass
class MLflowLogger(ServiceLogger):
    """Log metrics to an MLflow server or store, with `global_step` as their step.

    Numbers become points of a metric, strings tags of the run; tensors of more than one element
    are dropped. Characters that MLflow does not accept in names become underscores.

    The run's parameters are the settings of the configuration file without secrets, with names
    such as `trainer.init.seed`; in Python, those passed to `take_config`. MLflow does not change
    parameters: a resumed run keeps the first values, which is logged once.

    Checkpoints contain the run's id, so that a resumed run continues it. Steps are not sent twice:
    if a run goes back, MLflow keeps the points of the repeated steps, and continues after them.
    `metrics.jsonl` has the repeated ones. Points are sent about once a second; a killed process
    loses the last second.

    The package `mlflow-skinny`, which the extra installs, supports servers (http, https,
    databricks) and, with MLFLOW_ALLOW_FILE_STORE=true, folders (file). A database (sqlite,
    postgresql, mysql) requires `mlflow`, or a server in front of it.

    If the server cannot be reached at the start, a warning is logged once, and the fit continues.

    Args:
        experiment_name: The experiment; created if it does not exist.
        run_name: The name of the run; None = chosen by MLflow.
        tracking_uri: The server or store; None = MLflow's default (MLFLOW_TRACKING_URI).
        run_id: The run to continue; None = the checkpoint's, or a new one.
        tags: Names and values of the run's tags.

    State: The run's id.

    Raises:
        ConfigError: If a value is invalid; at set-up, if mlflow is not installed.

    Cost: A request about once a second, and one per string; training waits for the response.
    """

    experiment_name: Name = "Default"
    run_name: str | None = None
    tracking_uri: str | None = None
    run_id: str | None = None
    tags: dict[str, str] | None = None

    def __post_init__(self) -> None:
        super().__init__(log)
        self.tags = dict(self.tags or {})
        self._mlflow: Any = None
        self._client: Any = None
        self._points: list[Any] = []
        self._sent = 0.0

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        try:
            import mlflow
        except ImportError:
            raise ConfigError(
                "MLflowLogger requires mlflow, which is not installed: "
                "pip install 'modelzoo-trainer[mlflow]'"
            ) from None
        self._mlflow = mlflow

    # ---- the run

    @override
    def _begin(self) -> int:
        client = self._mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        known = self.run_id or self._id
        if known is None:
            run = client.create_run(
                self._experiment(client), run_name=self.run_name, tags=self.tags
            )
        else:
            run = client.get_run(known)
            client.update_run(known, status="RUNNING")
        self._client, self._id = client, run.info.run_id
        self._sent = time.monotonic()
        return 0

    def _experiment(self, client: Any) -> str:
        found = client.get_experiment_by_name(self.experiment_name)
        if found is not None:
            return str(found.experiment_id)
        return str(client.create_experiment(self.experiment_name))

    @override
    def _show(self, config: dict[str, Any]) -> None:
        wanted = {
            _UNFIT.sub("_", name)[:_LONGEST_NAME]: text[:_LONGEST_SETTING]
            for name, text in flat(config)
        }
        known = self._client.get_run(self._id).data.params
        others = [name for name, text in wanted.items() if known.get(name, text) != text]
        if others:
            log.info(
                "MLflowLogger: MLflow cannot change the parameters of a run; keeping the first "
                "values of %s.",
                ", ".join(others),
            )
        new = [
            self._mlflow.entities.Param(name, text)
            for name, text in wanted.items()
            if name not in known
        ]
        for start in range(0, len(new), _MOST_SETTINGS):
            self._client.log_batch(self._id, params=new[start : start + _MOST_SETTINGS])

    @override
    def _send(self, metrics: Metrics, step: int) -> None:
        now_ms = int(time.time() * 1000)
        for name, value in metrics.items():
            own = _UNFIT.sub("_", name)
            if isinstance(value, str):
                self._client.set_tag(self._id, own, value[:_LONGEST_TEXT])
            elif (number := _number(value)) is not None:
                self._points.append(self._mlflow.entities.Metric(own, number, now_ms, step))
            else:
                log.debug(
                    "Metric %s was not sent: type %s is not supported. Log a number or a string.",
                    name,
                    type(value).__name__,
                )
        if time.monotonic() - self._sent >= SEND_INTERVAL_S:
            self.flush()

    @override
    def flush(self) -> None:
        points, self._points = self._points, []
        self._sent = time.monotonic()
        for start in range(0, len(points), _MOST_AT_ONCE):
            self._client.log_batch(self._id, metrics=points[start : start + _MOST_AT_ONCE])

    @override
    def _end(self) -> None:
        self.flush()
        self._client.set_terminated(self._id)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings as pairs of a name, such as `trainer.init.seed`, and a string.

    `value`: mappings, lists and plain values. A list without mappings is one string.
    """
    items: list[tuple[Any, Any]] | None = None
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        items = list(enumerate(value))
    if not items:
        yield name, str(value)
        return
    for key, item in items:
        yield from flat(item, f"{name}.{key}" if name else str(key))


def _number(value: Any) -> float | None:
    if isinstance(value, (Tensor, np.ndarray)):
        size = value.numel() if isinstance(value, Tensor) else value.size
        return float(value.item()) if size == 1 else None
    if not isinstance(value, Real):
        return None
    return float(value)
