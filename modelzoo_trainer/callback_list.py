"""The callbacks of a trainer, in the order in which they are called."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch.nn import Module

from modelzoo_trainer.callback import CoreCallback, check_callback
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
from modelzoo_trainer.core.loop import LoopCallback, RunSchedule, TrainingLoop
from modelzoo_trainer.core.loss_accum import LossAccumulation
from modelzoo_trainer.core.model import ModelCallback
from modelzoo_trainer.core.optimizer import OptimizerCallback
from modelzoo_trainer.core.precision import Precision
from modelzoo_trainer.core.reproducibility import Reproducibility
from modelzoo_trainer.core.run_lock import RunLock
from modelzoo_trainer.core.schedulers import SchedulersCallback
from modelzoo_trainer.core.sparsity import Sparsity
from modelzoo_trainer.errors import ConfigError, HookError

_EXAMPLES: Final = {  # with a number that a user may have given instead
    "autorestart": "AutoRestart(max_num_restarts={0})",
    "checkpoint": "Checkpoint(steps={0})",
    "logging": "Logging(log_steps={0})",
    "loop": "TrainingLoop(num_steps={0}) or TrainingLoop(num_epochs={0})",
    "precision": "MixedPrecision() for bfloat16 or MixedPrecision(fp16_type='float16'); None is "
    "full precision",
}


def core_callbacks(parts: Mapping[str, Any]) -> OrderedDict[str, CoreCallback]:
    """Return the core callbacks, in order.

    What can be refused without touching anything comes first: device and precision before the
    folders are made.

    Args:
        parts: The trainer's arguments by name.

    Raises:
        ConfigError: If one of them does not fit.
    """
    model = parts["model"]
    own = {
        name: _own_part(name, parts[name], kind, default)
        for name, kind, default in (
            ("autorestart", AutoRestart, AutoRestart),
            ("precision", Precision, Precision),
            ("loop", LoopCallback, TrainingLoop),
            ("logging", Logging, Logging),
            ("checkpoint", Checkpoint, Checkpoint),
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
        model=ModelCallback(model),
        dataloader=DataLoaderCallback(),
        optimizer=OptimizerCallback(parts["optimizer"], model_is_built=isinstance(model, Module)),
        schedulers=SchedulersCallback(parts["schedulers"]),
        attribute_states=AttributeStates(),
        sparsity=Sparsity(parts["sparsity"]),
        loop=own["loop"],
        grad_accum=GradientAccumulation(num),
        run_schedule=RunSchedule(),
        logging=own["logging"],
        loss_accum=LossAccumulation(num),
        early_exit=EarlyExit(),
        interrupt=Interrupt(),  # after what it asks: a signal must not be forgotten there
        checkpoint=own["checkpoint"],
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


def checked_callbacks(callbacks: Iterable[Any] | Any, where: str = "callbacks") -> list[Any]:
    """Return a list of the callbacks that a user gave.

    Args:
        callbacks: An iterable of them, or a single one.
        where: The argument that they were given as, for messages.

    Returns:
        A copy; an object that was given twice is in it once, with a warning.

    Raises:
        HookError: If one is none, or is a core callback.
    """
    if isinstance(callbacks, Iterable) and not isinstance(callbacks, (str, Mapping)):
        given = list(callbacks)
    else:
        given = [callbacks]
    checked: list[Any] = []
    for callback in given:
        if isinstance(callback, CoreCallback):
            kind = type(callback).__name__
            raise HookError(
                f"{where} got a {kind}, which is a core callback. Pass it by its own "
                f"argument (loop, checkpoint, logging, precision, autorestart)."
            )
        check_callback(callback, where)
        if any(callback is known for known in checked):
            warnings.warn(
                f"{type(callback).__name__} was given twice as the same object; it runs once.",
                stacklevel=4,
            )
            continue
        checked.append(callback)
    return checked


def named(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return callbacks by class name; a repeat gets `_2`, `_3`, ..."""
    names: dict[str, Any] = {}
    for callback in callbacks:
        name = kind = type(callback).__name__
        number = 1
        while name in names:
            number += 1
            name = f"{kind}_{number}"
        names[name] = callback
    return names
