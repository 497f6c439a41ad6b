"""Check the arguments of a trainer, and explain unknown arguments and missing attributes."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from torch.nn import Module
from torch.optim import Optimizer

from modelzoo_trainer.base.constraints import Progress
from modelzoo_trainer.base.foreign_names import ATTRIBUTES, TRAINER_ARGUMENTS, advice_for
from modelzoo_trainer.core.autorestart import AutoRestart
from modelzoo_trainer.core.checkpoint import Checkpoint
from modelzoo_trainer.core.logging import Logging
from modelzoo_trainer.core.loop import TrainingLoop
from modelzoo_trainer.core.object_store import ObjectStore
from modelzoo_trainer.core.precision import MixedPrecision
from modelzoo_trainer.errors import ConfigError, suggest

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

SET_BY: Final = {
    "backend": "BackendCallback in pre_setup",
    "artifact_dir": "ArtifactDir in pre_setup",
    "summary_dir": "ArtifactDir in pre_setup",
    "model": "ModelCallback in setup",
    "compiled_model": "ModelCallback in setup",
    "optimizer": "OptimizerCallback in setup",
    "schedulers": "SchedulersCallback in setup",
    "global_step": "the loop in setup",
}
"""Attributes of the trainer that core callbacks set."""
_PARTS: Final[Mapping[str, type]] = {
    "loop": TrainingLoop,
    "checkpoint": Checkpoint,
    "logging": Logging,
    "precision": MixedPrecision,
    "autorestart": AutoRestart,
    "object_store": ObjectStore,
}
_ELSEWHERE: Final = {  # names in other trainers
    "accumulate_grad_batches": "grad_accum_steps",
    "gradient_accumulation_steps": "grad_accum_steps",
    "epochs": "num_epochs",
    "gradient_clip_val": "max_gradient_norm",
    "log_every_n_steps": "log_steps",
    "logging_steps": "log_steps",
    "max_epochs": "num_epochs",
    "max_grad_norm": "max_gradient_norm",
    "n_epochs": "num_epochs",
    "num_train_epochs": "num_epochs",
    "steps": "num_steps",
}
_WITHOUT_HALF_TYPE: Final = ("max_gradient_norm", "max_gradient_value")
_OF_FIT: Final = ("ckpt_path", "train_dataloader", "val_dataloader")
_KINDS: Final = (((str, Path), "model_dir"), (Module, "model"), (Optimizer, "optimizer"))


def check_progress(progress: Any) -> Progress | None:
    """Return `progress`.

    Raises:
        ConfigError: If it is invalid.
    """
    if progress is not None and progress not in get_args(Progress):
        raise ConfigError(
            f"progress is {progress!r}; it must be {', '.join(map(repr, get_args(Progress)))} or "
            f"None."
        )
    return progress  # type: ignore[no-any-return]  # one of them


def check_arguments(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the arguments of a trainer's constructor, and suggest replacements of unknown ones.

    Raises:
        TypeError: If an argument is unknown, or given by position.
    """
    parameters = list(inspect.signature(cls.__init__).parameters.values())  # type: ignore[misc]  # of a class, to read it
    if parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:  # a decorator without self
        parameters = parameters[1:]
    kinds = {p.kind for p in parameters}
    named = {p.name for p in parameters}
    places = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if len(args) > places and inspect.Parameter.VAR_POSITIONAL not in kinds:
        given = args[places]
        name = next((name for kind, name in _KINDS if isinstance(given, kind)), "model")
        raise TypeError(
            f"{cls.__name__} takes keyword arguments only, got {reprlib.repr(given)}. Write "
            f"{cls.__name__}({name}=...)."
        )
    for name, value in kwargs.items():
        if name not in named and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise TypeError(
                f"{cls.__name__} has no argument {name!r}. {_advice(name, value, named)}"
            )


def _advice(name: str, value: Any, known: set[str]) -> str:
    if name in _OF_FIT:
        return f"It is an argument of fit: trainer.fit(..., {name}=...)."
    meant = _ELSEWHERE.get(name, name)
    for part, kind in _PARTS.items():
        if meant in inspect.signature(kind).parameters:
            alone = "enabled=False, " if meant in _WITHOUT_HALF_TYPE else ""
            return f"Write {part}={kind.__name__}({alone}{meant}={reprlib.repr(value)})."
    return advice_for(TRAINER_ARGUMENTS, name) or suggest(name, known)


def explain_missing(trainer: Trainer, name: str) -> str:
    """Return the message for an attribute that a trainer does not have, or not yet."""
    if name == "optimizer" and trainer.manual_steps is not None:
        return (
            f"trainer.optimizer: there are several ({', '.join(trainer.optimizers)}). Use "
            f"trainer.optimizers[name], or the optimizer that is passed to the hook."
        )
    if name in SET_BY:
        return f"trainer.{name} is not set yet: {SET_BY[name]} sets it."
    return f"Trainer has no attribute {name!r}. {advice_for(ATTRIBUTES, name)}".rstrip()
