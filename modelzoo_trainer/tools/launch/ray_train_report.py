"""Report metrics and checkpoints to Ray Train."""

from __future__ import annotations

import json
import logging
import math
import numbers
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer import checkpointing
from modelzoo_trainer.base.constraints import PositiveInt, checked
from modelzoo_trainer.callback import Callback, Metrics, StateDict
from modelzoo_trainer.checkpointing.stores.mirror import located
from modelzoo_trainer.errors import CheckpointError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.ray")

POINTER: Final = "checkpoint.json"
"""The file of a checkpoint of Ray that has the path of ours."""


class RayTrainReport(Callback):
    """Report metrics and the path of the newest checkpoint to Ray Train.

    `modelzoo_trainer.cli.ray_worker.worker` adds it. After each checkpoint, at the end of a fit and
    every `steps` steps all processes call `ray.train.report`, which waits for all of them, and for
    up to 2 s if the report before is not yet processed. The metrics are the latest values of all
    names, with `step`, and `checkpoint_path` once there is a checkpoint. A new checkpoint is
    reported as a checkpoint of Ray with one file, `checkpoint.json`, which has its `path` and
    `step`: its data stays in `model_dir`, and Ray deletes none of it. One that is written in the
    background is reported with the next one, or at the end; the newest one is reported at the end
    once more, with the metrics of the last validation.

    Every `log_steps` steps of `Logging` (100 if that is 0) Ray is asked whether it is about to take
    a node away; then a checkpoint is written at once. A worker that Ray has started again resumes
    from the newest intact checkpoint, whatever `ckpt_path` is. Outside of a worker of Ray Train the
    callback has no effect.

    Args:
        steps: Steps between two reports, > 0; None = only after checkpoints and at the end. Ray
            keeps only metrics that come with a checkpoint, so this is for callbacks of Ray.

    Raises:
        ConfigError: If `steps` is not positive.
    """

    @checked()
    def __init__(self, steps: PositiveInt | None = None) -> None:
        self.steps = steps
        self.stopped_by: str | None = None
        """What stopped the run, as `trainer.interrupted`; None = nothing."""
        self.error: BaseException | None = None
        """The exception that left the fit."""
        self._train: Any = None  # the module, in a worker of Ray Train
        self._is_due = False
        self._latest: dict[str, Any] = {}
        self._checkpoint: str | None = None
        self._checkpoint_step = 0
        self._is_new = False
        self._has_saved = False

    @override
    def setup(self, trainer: Trainer) -> None:
        own = (each for each in trainer.callbacks.values() if isinstance(each, RayTrainReport))
        self._train = _ray_train() if next(own, self) is self else None  # else a global one
        if self._train is not None and self._train.get_checkpoint() is not None:
            trainer.autorestart.resume_run()

    @override
    def on_metrics(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        if self._train is not None:
            self._latest |= {name: _plain(value) for name, value in metrics.items()}

    @override
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        if self._train is None or not trainer.backend.comm.is_main:
            return
        with suppress(CheckpointError):  # already deleted, by KeepNCheckpoints for example
            self._checkpoint_step = checkpointing.read_manifest(ckpt_path).step
            self._checkpoint, self._is_new = _place_of(ckpt_path), True

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        self._is_due = True  # in all processes at the same step, unlike the end of a save

    @override
    def on_step_committed(self, trainer: Trainer) -> None:
        if self._train is None:
            return
        step = trainer.global_step
        if not self._has_saved and step % (trainer.logging.log_steps or 100) == 0:
            self._save_if_preempted(trainer)
        if self._is_due or (self.steps is not None and step % self.steps == 0):
            self._report(trainer)

    def _save_if_preempted(self, trainer: Trainer) -> None:
        ask = getattr(self._train, "get_preemption_info", None)  # not in all releases of Ray
        if ask is None or ask() is None:
            return
        self._has_saved = True
        if trainer.backend.comm.is_main:
            log.warning("Ray is about to take a node away.")
        if not self._is_due:  # else one of this step has been written
            trainer.save_checkpoint()

    @override
    def on_interrupt(self, trainer: Trainer, reason: str) -> None:
        self.stopped_by = reason

    @override
    def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self.error = exception

    @override
    def on_fit_committed(self, trainer: Trainer, loop: Callback) -> None:
        if self._train is not None:
            self._is_new = True  # so that Ray keeps the metrics of the last validation
            self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        """Report from each process; what others than the main one report has no effect."""
        self._is_due = False
        if not trainer.backend.comm.is_main:
            self._train.report({})
            return
        metrics = {**self._latest, "step": trainer.global_step}
        if self._checkpoint is None:
            self._train.report(metrics)
            return
        metrics["checkpoint_path"] = self._checkpoint
        if not self._is_new:
            self._train.report(metrics)
            return
        self._is_new = False
        with tempfile.TemporaryDirectory() as folder:
            pointer = {"path": self._checkpoint, "step": self._checkpoint_step}
            (Path(folder) / POINTER).write_text(json.dumps(pointer), encoding="utf-8")
            self._train.report(metrics, checkpoint=self._train.Checkpoint.from_directory(folder))


def _ray_train() -> Any:
    """Return the module `ray.train` in a worker of Ray Train; None elsewhere."""
    if "ray.train" not in sys.modules:  # a worker has imported it
        return None
    train = import_module("ray.train")
    try:
        train.get_context().get_world_rank()
    except RuntimeError:
        return None
    return train


def _place_of(path: Path) -> str:
    """Return the absolute path of a checkpoint, or its URL in an object store."""
    mirror, name = located(path)
    return str(path.absolute()) if mirror is None else mirror.url_of(name)


def _plain(value: Any) -> Any:
    """Return a value that Ray can keep as JSON."""
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else str(number)
