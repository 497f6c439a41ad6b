"""A PyTorch trainer that consists of hook calls.

The names below are imported when they are first used, so that the command line starts fast. Modules
are also found under their former paths (`_moved.py`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from modelzoo_trainer._moved import find_moved_modules
from modelzoo_trainer.base.exports import lazy_exports

if TYPE_CHECKING:
    from modelzoo_trainer.callback import (
        Callback,
        CoreCallback,
        ValidationCallback,
        register_global_callback,
    )
    from modelzoo_trainer.core import (
        AutoRestart,
        Checkpoint,
        Logging,
        MixedPrecision,
        ObjectStore,
        Precision,
        TrainingLoop,
        ValidationLoop,
    )
    from modelzoo_trainer.core.parts.closures import step_closure
    from modelzoo_trainer.core.parts.predictions import Predictions
    from modelzoo_trainer.core.parts.summaries import summarize_scalar, summarize_tensor
    from modelzoo_trainer.errors import (
        CheckpointError,
        CheckpointMismatch,
        ConfigError,
        HookError,
        ModelZooError,
        PredictionError,
        RollBack,
        StopTraining,
        TrainingSpike,
    )
    from modelzoo_trainer.hooks.interceptors import Interceptable, event
    from modelzoo_trainer.hooks.logger import Logger
    from modelzoo_trainer.hooks.spec import HOOKS
    from modelzoo_trainer.hooks.standalone import Hooks
    from modelzoo_trainer.trainer import Trainer

__version__ = "0.1.0"

_HOMES: Final = {
    "hooks.advice": ("Advised",),  # deprecated
    "hooks.interceptors": ("Interceptable", "event"),
    "callback": (
        "HOOKS",
        "Callback",
        "CoreCallback",
        "ValidationCallback",
        "register_global_callback",
    ),
    "core.parts.closures": ("step_closure",),
    "core": (
        "AutoRestart",
        "Checkpoint",
        "Logging",
        "MixedPrecision",
        "ObjectStore",
        "Precision",
        "TrainingLoop",
        "ValidationLoop",
    ),
    "errors": (
        "CheckpointError",
        "CheckpointMismatch",
        "ConfigError",
        "HookError",
        "ModelZooError",
        "PredictionError",
        "RollBack",
        "StopTraining",
        "TrainingSpike",
    ),
    "hooks.logger": ("Logger",),
    "hooks.standalone": ("Hooks",),
    "core.parts.predictions": ("Predictions",),
    "core.parts.summaries": ("summarize_scalar", "summarize_tensor"),
    "trainer": ("Trainer",),
}
_PACKAGES: Final = ("callbacks", "loggers", "optim")

__all__ = [
    "HOOKS",
    "AutoRestart",
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "CheckpointMismatch",
    "ConfigError",
    "CoreCallback",
    "HookError",
    "Hooks",
    "Interceptable",
    "Logger",
    "Logging",
    "MixedPrecision",
    "ModelZooError",
    "ObjectStore",
    "Precision",
    "PredictionError",
    "Predictions",
    "RollBack",
    "StopTraining",
    "Trainer",
    "TrainingLoop",
    "TrainingSpike",
    "ValidationCallback",
    "ValidationLoop",
    "event",
    "register_global_callback",
    "step_closure",
    "summarize_scalar",
    "summarize_tensor",
]

find_moved_modules()
_find, __dir__ = lazy_exports(__name__, _HOMES)

if not TYPE_CHECKING:  # else a checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return import_module(f"modelzoo_trainer.{name}")
        try:
            return _find(name)
        except AttributeError as error:
            advice = _advice(name) if name[:1].isupper() else ""
            if advice:  # an AttributeError would lose the text in `from ... import`
                raise ImportError(f"{error}. {advice}") from None
            raise


def _advice(name: str) -> str:
    """Return where a class is, or what to use instead of one of another trainer; "" = unknown."""
    for package in (f"modelzoo_trainer.{inside}" for inside in _PACKAGES):
        if name in getattr(import_module(package), "__all__", ()):
            return f"Write: from {package} import {name}"
    foreign = import_module("modelzoo_trainer.base.foreign_names")
    advice: str = foreign.advice_for(foreign.CALLBACKS, name)
    return advice
