"""The names that a file may use: all shipped classes, and classes of the user's modules."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import EllipsisType, ModuleType
from typing import Any, Final

import torch

from modelzoo_trainer import callbacks, core, loggers
from modelzoo_trainer.base.devices import BackendError, BackendUnavailable, backend_names
from modelzoo_trainer.base.named_backends import named_backend
from modelzoo_trainer.base.user_modules import is_path
from modelzoo_trainer.checkpointing.stores.urls import is_url, parse_url
from modelzoo_trainer.config.components import Component
from modelzoo_trainer.config.fitting import fitting, fitting_callback, with_groups, with_optimizer
from modelzoo_trainer.config.names import Names, NameTable
from modelzoo_trainer.config.published import published_fields, published_names, published_schema
from modelzoo_trainer.core.parts.model_length import NO_LIMIT
from modelzoo_trainer.core.parts.named_checkpoints import NAMES, listed
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import (
    OPTIMIZERS,
    SCHEDULERS,
    Scheduler,
    check_conflicts,
    optimizer_class,
    scheduler_class,
)
from modelzoo_trainer.trainer import Trainer
from modelzoo_trainer.zoo.data.registry import PROCESSORS, processor_class
from modelzoo_trainer.zoo.models.registry import MODELS, model_class

_OF_A_MODEL: Final = ("params", "adjust_learning_rate", "adamw_params")
"""Arguments of optimizers that refer to a model's parameters."""


def shipped_names(modules: Iterable[ModuleType] = ()) -> Names:
    """Return all shipped names.

    `modules`: imported modules of the user, whose public classes may be named too.
    """
    own = tuple(modules)

    def table(
        kind: str, names: Iterable[str], load: Callable[[str], Any], adapt: Callable[[Any], Any]
    ) -> NameTable:
        return NameTable(
            kind=kind,
            names=tuple(names),
            load=load,
            modules=own,
            adapt=adapt,
            published=published_schema,  # classes that are not shipped, by their schema
            published_names=published_names,
        )

    def exported(kind: str, package: Any) -> NameTable:
        """Return the table of the classes that a package exports: its `__all__` is the registry."""
        load = partial(getattr, package)
        classes = [name for name in package.__all__ if isinstance(load(name), type)]
        return table(kind, classes, load, fitting_callback)

    return Names(
        trainer=Trainer,
        models=table("model", MODELS, model_class, partial(fitting, "model")),
        optimizers=table(
            "optimizer",
            OPTIMIZERS,
            optimizer_class,
            lambda target: with_groups(fitting("optimizer", target)),
        ),
        schedulers=table(
            "scheduler",
            SCHEDULERS,
            scheduler_class,
            lambda target: with_optimizer(fitting("scheduler", target)),
        ),
        callbacks=exported("callback", callbacks),
        loggers=exported("logger", loggers),
        processors=table(
            "data processor", PROCESSORS, processor_class, partial(fitting, "data processor")
        ),
        sections={
            "precision": core.MixedPrecision,
            "loop": core.TrainingLoop,
            "checkpoint": core.Checkpoint,
            "logging": core.Logging,
            "autorestart": core.AutoRestart,
            "object_store": core.ObjectStore,
        },
        try_backend=_try_backend,
        try_model=_try_model,
        model_limit=_model_limit,
        try_optimizer=_try_optimizer,
        try_scheduler=_try_scheduler,
        try_together=_try_together,
        try_callback=_try_callback,
        try_processor=_try_processor,
        try_checkpoint=_try_checkpoint,
        published_fields=published_fields,
        default_callbacks=callbacks.default_callbacks,
        default_loggers=loggers.default_loggers,
    )


def _try_backend(device: str | None, options: Mapping[str, Any]) -> str | None:
    """Make a backend, which starts nothing, and discard it."""
    name = device or "cpu"
    try:
        named_backend(name, options)
    except BackendUnavailable as error:
        if is_path(name) or name.lower() in backend_names():
            return str(error)
        raise ConfigError(str(error)) from None
    except BackendError as error:
        raise ConfigError(str(error)) from None
    return None


def _try_model(component: Component) -> Any:
    """Check the arguments of a shipped model without building it."""
    if not _is_shipped(component):
        return None
    return component.target.check_arguments(**component.arguments)


def _model_limit(component: Component, name: str) -> int | EllipsisType | None:
    """Return the limit that a model will have as the attribute `name`, without building it."""
    target = component.target
    if not _is_shipped(component):
        return ...
    limit_of = getattr(target, "limit_of", None)
    if limit_of is not None:
        found = limit_of(name, component.arguments)
    elif name in inspect.signature(target).parameters:
        found = component.arguments.get(name, inspect.signature(target).parameters[name].default)
    else:
        found = ... if hasattr(target, name) else None
    is_none = isinstance(found, int) and found >= NO_LIMIT
    return None if is_none or not isinstance(found, int | EllipsisType) else found


class _ArgumentsFitError(Exception):
    """An optimizer reads its parameters."""


class _NoParameters:
    """Stands for parameters; an optimizer that reads them has accepted its arguments."""

    def __iter__(self) -> Iterator[Any]:
        raise _ArgumentsFitError


def _try_optimizer(component: Component) -> None:
    """Make a shipped optimizer up to its parameters, without filters that need a model.

    Only then would torch load its compiler, which takes as long as the rest of a check.
    """
    if not (_is_shipped(component) or _is_of_torch(component)):
        return
    given = component.arguments.items()
    arguments = {key: value for key, value in given if key not in _OF_A_MODEL}
    with suppress(_ArgumentsFitError):
        component.target(_NoParameters(), **arguments)


def _try_scheduler(component: Component) -> None:
    """Make a shipped scheduler without an optimizer, one of torch's with a small one."""
    if _is_shipped(component):
        component.make(None)
    elif _is_of_torch(component) and "lr_lambda" not in component.arguments:
        small = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.1)
        try:
            made = component.make(small)
            small.step()
            made.step()
        except ConfigError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"torch rejects the arguments ({type(error).__name__}): {error}"
            ) from None


def _try_together(optimizer: Component | None, schedulers: list[Component]) -> None:
    """Raise if schedules set the same value, or are for a tag that no parameter has."""
    made = [one.make(None) for one in schedulers if _is_shipped(one)]
    schedules = [one for one in made if isinstance(one, Scheduler)]
    check_conflicts(schedules)
    if optimizer is None or not _is_shipped(optimizer):
        return
    known = {one["tag"] for one in optimizer.arguments.get("params") or ()}
    for schedule in schedules:
        tags = schedule.param_group_tags
        if tags is not None and known.isdisjoint(tags):
            listed = ", ".join(sorted(known)) or "none"
            raise ConfigError(
                f"{type(schedule).__name__}.param_group_tags: no parameters have one of "
                f"the tags {list(tags)}. Tags in the optimizer's params: {listed}."
            )


def _try_processor(component: Component) -> list[str]:
    """Check the arguments of a shipped data processor without reading data."""
    if not _is_shipped(component):
        return []
    lacks: list[str] = component.target.check_arguments(**component.arguments)
    return lacks


def _try_callback(component: Component) -> Any:
    """Make a shipped callback or logger: its constructor only stores its arguments."""
    return component.make() if _is_shipped(component) else None


def _try_checkpoint(ckpt_path: str) -> list[str]:
    if ckpt_path in NAMES:  # found in the folder of the run
        return []
    if is_url(ckpt_path):
        try:
            found = parse_url(ckpt_path)
        except ConfigError as error:
            return [str(error)]
        if not isinstance(found, Path):
            return []  # found in its store, when the run starts
        ckpt_path = str(found)
    path = Path(ckpt_path)
    if os.path.exists(path):  # as False where the name is too long
        return []
    return [f"checkpoint {ckpt_path!r} does not exist. {listed(path.parent)}"]


def _is_of_torch(component: Component) -> bool:
    return str(component.target.__module__).startswith("torch.optim.")


def _is_shipped(component: Component) -> bool:
    return str(component.target.__module__).startswith("modelzoo_trainer.")
