"""The core callbacks of a trainer, in order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from torch.nn import Module

from modelzoo_trainer.callback import CoreCallback
from modelzoo_trainer.core.artifact_dir import ArtifactDir
from modelzoo_trainer.core.attribute_states import AttributeStates
from modelzoo_trainer.core.autorestart import AutoRestart
from modelzoo_trainer.core.backend import BackendCallback
from modelzoo_trainer.core.checkpoint import Checkpoint
from modelzoo_trainer.core.dataloader import DataLoaderCallback
from modelzoo_trainer.core.early_exit import EarlyExit
from modelzoo_trainer.core.grad_accum import GradientAccumulation
from modelzoo_trainer.core.interrupt import Interrupt
from modelzoo_trainer.core.logging import Logging
from modelzoo_trainer.core.loop import LoopCallback, TrainingLoop
from modelzoo_trainer.core.loss_accum import LossAccumulation
from modelzoo_trainer.core.model import ModelCallback
from modelzoo_trainer.core.object_store import ObjectStore
from modelzoo_trainer.core.optimizer import OptimizerCallback
from modelzoo_trainer.core.precision import Precision
from modelzoo_trainer.core.predicting import Predicting
from modelzoo_trainer.core.reproducibility import Reproducibility
from modelzoo_trainer.core.run_lock import RunLock
from modelzoo_trainer.core.run_schedule import RunSchedule
from modelzoo_trainer.core.schedulers import SchedulersCallback
from modelzoo_trainer.core.sparsity import Sparsity
from modelzoo_trainer.core.summary import Summary
from modelzoo_trainer.errors import ConfigError

_EXAMPLES: Final = {  # formatted with a number that may have been given instead
    "autorestart": "AutoRestart(max_num_restarts={0})",
    "checkpoint": "Checkpoint(steps={0})",
    "logging": "Logging(log_steps={0})",
    "loop": "TrainingLoop(num_steps={0}) or TrainingLoop(num_epochs={0})",
    "object_store": "ObjectStore(cache_size={0})",
    "precision": "MixedPrecision() for bfloat16 or MixedPrecision(fp16_type='float16'); None is "
    "full precision",
}


def core_callbacks(parts: Mapping[str, Any]) -> OrderedDict[str, CoreCallback]:
    """Return the core callbacks, in order.

    Those that may refuse a configuration without side effects come first: device and precision
    before folders are created.

    Args:
        parts: The trainer's arguments by name.

    Raises:
        ConfigError: If one of them is invalid.
    """
    model = parts["model"]
    own = {
        name: _own_part(name, parts.get(name), kind, default)
        for name, kind, default in (
            ("autorestart", AutoRestart, AutoRestart),
            ("precision", Precision, Precision),
            ("loop", LoopCallback, TrainingLoop),
            ("logging", Logging, Logging),
            ("checkpoint", Checkpoint, Checkpoint),
            ("object_store", ObjectStore, ObjectStore),
        )
    }
    num = getattr(own["loop"], "grad_accum_steps", 1)
    return OrderedDict(
        autorestart=own["autorestart"],
        reproducibility=Reproducibility(parts["seed"]),
        backend=BackendCallback(parts["backend"], parts["device"]),
        precision=own["precision"],
        run_lock=RunLock(),
        artifact_dir=ArtifactDir(),
        model=ModelCallback(model, parts.get("call_model")),
        dataloader=DataLoaderCallback(),
        optimizer=OptimizerCallback(parts["optimizer"], model_is_built=isinstance(model, Module)),
        schedulers=SchedulersCallback(parts["schedulers"]),
        attribute_states=AttributeStates(),
        sparsity=Sparsity(parts["sparsity"]),
        loop=own["loop"],
        grad_accum=GradientAccumulation(num),
        run_schedule=RunSchedule(),
        logging=own["logging"],
        object_store=own["object_store"],  # waits for uploads before the log is closed
        loss_accum=LossAccumulation(num),
        early_exit=EarlyExit(),
        interrupt=Interrupt(),  # after those it queries, so that no signal is lost
        checkpoint=own["checkpoint"],
        predicting=Predicting(),
        summary=Summary(),  # after what it reports: its result is built before they leave
    )


def _own_part(name: str, given: Any, kind: type, default: type) -> Any:
    if given is None:
        return default()
    if not isinstance(given, kind):
        number = given if type(given) is int else 100
        raise ConfigError(
            f"{name} got {given!r}. Pass an instance of {kind.__name__}, such as "
            f"{_EXAMPLES[name].format(number)}."
        )
    return given
