"""What a file may name: everything that is shipped, and modules of the user's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from backends import BackendError, make_backend
from modelzoo_trainer import callbacks, core, loggers
from modelzoo_trainer.config.names import Names, NameTable
from modelzoo_trainer.data.registry import PROCESSORS, processor_class
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.models.registry import MODELS, model_class
from modelzoo_trainer.optim import OPTIMIZERS, SCHEDULERS, optimizer_class, scheduler_class
from modelzoo_trainer.trainer import Trainer


def shipped_names(modules: Iterable[ModuleType] = ()) -> Names:
    """Return all shipped names.

    Args:
        modules: The user's, imported; their public classes may be named as well.
    """
    own = tuple(modules)
    return Names(
        trainer=Trainer,
        models=NameTable(kind="model", names=tuple(MODELS), load=model_class, modules=own),
        optimizers=NameTable(
            kind="optimizer", names=tuple(OPTIMIZERS), load=optimizer_class, modules=own
        ),
        schedulers=NameTable(
            kind="scheduler", names=tuple(SCHEDULERS), load=scheduler_class, modules=own
        ),
        callbacks=_exported("callback", callbacks, own),
        loggers=_exported("logger", loggers, own),
        processors=NameTable(
            kind="data processor", names=tuple(PROCESSORS), load=processor_class, modules=own
        ),
        sections={
            "precision": core.MixedPrecision,
            "loop": core.TrainingLoop,
            "checkpoint": core.Checkpoint,
            "logging": core.Logging,
        },
        try_backend=_try_backend,
        default_callbacks=callbacks.default_callbacks,
        default_loggers=loggers.default_loggers,
    )


def _try_backend(device: str | None, options: Mapping[str, Any]) -> None:
    """Make a backend, which starts nothing, and forget it."""
    try:
        make_backend(device or "cpu", options)
    except BackendError as error:
        raise ConfigError(str(error)) from None


def _exported(kind: str, package: Any, modules: tuple[ModuleType, ...]) -> NameTable:
    """Return the table of the classes that a package exports: its `__all__` is the registry."""
    classes = [name for name in package.__all__ if isinstance(getattr(package, name), type)]

    def load(name: str) -> Any:
        return getattr(package, name)

    return NameTable(kind=kind, names=tuple(classes), load=load, modules=modules)
