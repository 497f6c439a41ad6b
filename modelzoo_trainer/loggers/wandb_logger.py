"""Metrics for Weights & Biases."""

from __future__ import annotations

import logging
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import numpy as np
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.callback import Loader, Metrics
from modelzoo_trainer.constraints import checked
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loggers.service_logger import ServiceLogger

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.wandb")

Resume = Literal["never", "allow", "auto", "must"]

# What a process that is killed loses; the library's own is 15.
FLUSH_INTERVAL_S: Final = 1.0
_FLUSH_SETTING: Final = "x_transaction_log_flush_interval"


class WandbLogger(ServiceLogger):
    """Sends metrics to Weights & Biases, with `global_step` as their step.

    Numbers become points of their charts, tensors with dimensions histograms; strings go to the
    run's summary, tables (a pandas DataFrame, or a mapping with `columns` and `data`) are shown as
    such. Its files are in `wandb` in `model_dir`. Without a network set WANDB_MODE=offline, and
    send them later with `wandb sync`.

    The run's config is the file that the run is from, without its secrets; a run from Python has
    what is given to `take_config`. One that continues has the newest.

    The run's id is in the checkpoints: a run that resumes continues with it. Steps that it has been
    sent are not sent again, as Weights & Biases takes none twice: after a run went back, its charts
    keep the points of the steps that it took back, and continue behind them. `metrics.jsonl` has
    those that count. A process that is killed loses about the last second, and of one that resumes
    the charts continue behind it.

    Processes that a program starts which uses wandb itself share its service, which it leaves to
    them in WANDB_SERVICE. That keeps the run of one that is killed open, and refuses it to the next
    one; so take WANDB_SERVICE out of their environment.

    A service that cannot be reached at the beginning is logged once, and the fit continues without.

    Args:
        project: Where the run is shown; None = as the library is set up.
        group: What it is shown with.
        run_id: Its id; None = that of the checkpoint, or a new one.
        run_name: What it is called.
        job_type: What kind of run it is.
        tags: Words to find it by.
        resume: "auto" and "allow" continue the run of the checkpoint or of `run_id`, or begin a
            new one; "must" refuses to begin one; "never" always begins one.
        entity: Whose the project is; None = as the library is set up.

    State: The run's id.

    Raises:
        ConfigError: If a value does not fit; at set-up, if wandb is not installed; at the start of
            a fit, if there is no run to continue with and `resume` is "must".

    Cost: About 0.2 ms a log step.
    """

    _sends_whole_steps = True

    @checked()
    def __init__(  # noqa: PLR0913  # the format's arguments
        self,
        project: str | None = None,
        group: str | None = None,
        run_id: str | None = None,
        run_name: str | None = None,
        job_type: str | None = None,
        tags: Annotated[list[str], "a list of words"] | None = None,
        resume: Resume = "auto",
        entity: str | None = None,
    ) -> None:
        super().__init__(log)
        self.project = project
        self.group = group
        self.run_id = run_id
        self.run_name = run_name
        self.job_type = job_type
        self.tags = tags
        self.resume = resume
        self.entity = entity
        self._wandb: Any = None
        self._run: Any = None

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "WandbLogger needs wandb, which is not installed: "
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
                "WandbLogger.resume is 'must', but there is no run to resume: neither run_id "
                "is given, nor has a checkpoint one. Use 'auto' to begin a new one."
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
            reinit="create_new",  # the program may have a run of its own
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
                log.debug("%s of type %s is not sent.", name, type(value).__name__)
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
