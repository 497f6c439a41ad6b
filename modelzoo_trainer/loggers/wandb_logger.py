"""Metrics for Weights & Biases."""

from __future__ import annotations

import logging
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import numpy as np
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.base.constraints import checked_dataclass
from modelzoo_trainer.callback import Loader, Metrics
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loggers.service_logger import ServiceLogger

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.wandb")

Resume = Literal["never", "allow", "auto", "must"]

# What a killed process loses; the library's default is 15.
FLUSH_INTERVAL_S: Final = 1.0
_FLUSH_SETTING: Final = "x_transaction_log_flush_interval"


@checked_dataclass
class WandbLogger(ServiceLogger):
    """Log metrics to Weights & Biases, with `global_step` as their step.

    Numbers become points of charts, tensors with dimensions histograms; strings are added to the
    run's summary, tables (a pandas DataFrame, or a mapping with `columns` and `data`) are shown as
    tables. Local files are in `wandb` in `model_dir`. Without a network set WANDB_MODE=offline, and
    send them later with `wandb sync`.

    The run's config is the configuration file without secrets; in Python, what is passed to
    `take_config`. A resumed run updates it.

    Checkpoints contain the run's id, so that a resumed run continues it. Weights & Biases does not
    accept a step twice: if a run goes back, its charts keep the points of the repeated steps, and
    continue after them. `metrics.jsonl` has the repeated ones. A killed process loses about the
    last second.

    If a program that itself uses wandb starts this process, they share its service by
    WANDB_SERVICE, which keeps the run of a killed process open and locked. Remove WANDB_SERVICE
    from the environment of such processes.

    If the service cannot be reached at the start, a warning is logged once, and the fit continues.

    Args:
        project: The project; None = the library's default.
        group: The group of runs.
        run_id: The run's id; None = the checkpoint's, or a new one.
        run_name: The run's name.
        job_type: The type of the run.
        tags: Tags of the run.
        resume: "auto" and "allow" continue the run of the checkpoint or of `run_id`, or start a
            new one; "must" raises if there is none; "never" always starts a new one.
        entity: The owner of the project; None = the library's default.

    State: The run's id.

    Raises:
        ConfigError: If a value is invalid; at set-up, if wandb is not installed; at the start of
            a fit, if there is no run to continue and `resume` is "must".

    Cost: About 0.2 ms per log step.
    """

    _sends_whole_steps = True

    project: str | None = None
    group: str | None = None
    run_id: str | None = None
    run_name: str | None = None
    job_type: str | None = None
    tags: Annotated[list[str], "a list of words"] | None = None
    resume: Resume = "auto"
    entity: str | None = None

    def __post_init__(self) -> None:
        super().__init__(log)
        self._wandb: Any = None
        self._run: Any = None

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "WandbLogger requires wandb, which is not installed: "
                "pip install 'modelzoo-trainer[wandb]'"
            ) from None
        self._wandb = wandb

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        super().on_fit_start(trainer, train_dataloader, val_dataloader, loop)
        if self.resume == "must" and self._known_id() is None:
            raise ConfigError(
                "WandbLogger.resume is 'must', but there is no run to resume: run_id is not given, "
                "and no checkpoint with a run id was loaded. To start a new run, set resume to "
                "'auto'."
            )

    def _known_id(self) -> str | None:
        if self.resume == "never" and not self._is_open:
            return self.run_id
        return self.run_id or self._id

    # ---- the run

    @override
    def _begin(self) -> int:
        known = self._known_id()
        settings = {}
        if _FLUSH_SETTING in getattr(self._wandb.Settings, "model_fields", {}):
            settings[_FLUSH_SETTING] = FLUSH_INTERVAL_S
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.group,
            job_type=self.job_type,
            name=self.run_name,
            tags=self.tags,
            id=known,
            resume=self._rule(known),
            dir=str(self._folder),
            reinit="create_new",  # the program may have another run
            settings=self._wandb.Settings(**settings),
        )
        self._id = self._run.id
        return int(self._run.starting_step) if self._run.resumed else 0

    def _rule(self, known: str | None) -> str | None:
        if known is None:
            return None
        return "allow" if self.resume == "auto" else self.resume

    @override
    def _show(self, config: dict[str, Any]) -> None:
        self._run.config.update(config, allow_val_change=True)

    @override
    def _send(self, metrics: Metrics, step: int) -> None:
        points = {}
        for name, value in metrics.items():
            if isinstance(value, str):
                self._run.summary[name] = value
            elif (point := self._point(value)) is not None:
                points[name] = point
            else:
                log.debug(
                    "Metric %s was not sent: type %s is not supported. Log a number or a string.",
                    name,
                    type(value).__name__,
                )
        if points:
            self._run.log(points, step=step)

    def _point(self, value: Any) -> Any:
        if isinstance(value, Real):
            return float(value) if isinstance(value, np.generic) else value
        if isinstance(value, (Tensor, np.ndarray)):
            return self._of_array(value)
        if hasattr(value, "columns") and hasattr(value, "iloc"):
            return self._wandb.Table(dataframe=value)
        if isinstance(value, dict) and value.keys() == {"columns", "data"}:
            return self._wandb.Table(columns=value["columns"], data=value["data"])
        return None

    def _of_array(self, value: Tensor | np.ndarray[Any, Any]) -> Any:
        array = value.double().numpy() if isinstance(value, Tensor) else value
        if array.size == 1:
            return array.item()
        finite = array.size and np.isfinite(array).all()
        return self._wandb.Histogram(array) if finite else None

    @override
    def _end(self) -> None:
        run, self._run = self._run, None
        run.finish()
