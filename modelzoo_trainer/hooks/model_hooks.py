"""Hooks that the model itself defines."""

from __future__ import annotations

import dis
import logging
from types import FunctionType
from typing import Any, Final

from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from modelzoo_trainer.hooks.spec import HookFn, check_listener

_INNER: Final = (
    "_orig_mod",
    "_fsdp_wrapped_module",
)  # attributes in which torch's wrappers hold the model
_PREFIX: Final = "on_"
_LIGHTNING: Final = ("training_step", "configure_optimizers")

log = logging.getLogger("modelzoo_trainer.model")


class ModelHooks:
    """The methods of a model whose names begin with `on_`, as a callback.

    Other methods of a model, such as `setup` or `finalize`, are not hooks of the run. Neither is an
    empty method that the model's class inherits as a placeholder.
    """

    def __init__(self, model: Module) -> None:
        self.__wrapped__ = unwrapped(model)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_PREFIX) and not is_placeholder(type(self.__wrapped__), name):
            return getattr(self.__wrapped__, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")


def model_hooks(model: Module) -> ModelHooks | None:
    """Return the hooks of a trainer's model, wrapped or not, or None if it defines none.

    Raises:
        HookError: If a method is a near miss of a hook, or has other parameters than the hook.
    """
    kind = type(unwrapped(model))
    _warn_of_steps(kind)
    names = [name for name in dir(kind) if name.startswith(_PREFIX)]
    methods = {
        name: getattr(kind, name)
        for name in names
        if callable(getattr(kind, name)) and not is_placeholder(kind, name)
    }
    if not methods:
        return None
    check_listener(kind.__name__, methods)
    return ModelHooks(model)


def _warn_of_steps(kind: type) -> None:
    """Warn that the step methods of a LightningModule, or a similar class, are not called."""
    if all(callable(getattr(kind, name, None)) for name in _LIGHTNING):
        log.warning(
            "%s.%s are not called, because this trainer does not run LightningModules. Return the "
            "loss from the model's forward(batch), or override Trainer.compute_loss. Pass the "
            "optimizer and the schedulers as Trainer(optimizer=..., schedulers=...).",
            kind.__name__,
            " and ".join(_LIGHTNING),
        )


def is_placeholder(kind: type, name: str) -> bool:
    """Return whether a class inherits a method that does nothing."""
    method = getattr(kind, name, None)
    if name in vars(kind) or not isinstance(method, FunctionType):
        return False
    return _statements(method) == _statements(_empty)


def _statements(function: HookFn) -> list[tuple[str, Any]]:
    """Return the instructions of a function."""
    return [(one.opname, one.argval) for one in dis.get_instructions(function)]


def _empty() -> None:
    pass


def unwrapped(model: Module) -> Module:
    """Return the model inside torch's wrappers for compilation and data parallelism."""
    while True:
        parts = model._modules
        inner = next((parts[name] for name in _INNER if parts.get(name) is not None), None)
        if inner is None and isinstance(model, (DataParallel, DistributedDataParallel)):
            inner = model.module
        if inner is None:
            return model
        model = inner
