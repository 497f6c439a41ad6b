"""Whether initial values may be drawn late, or not at all: where nothing reads them first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from modelzoo_trainer.callback import Callback
from modelzoo_trainer.hooks.interceptors.objects import functions_of

if TYPE_CHECKING:
    from modelzoo_trainer.core.model import ModelCallback
    from modelzoo_trainer.trainer import Trainer

_PACKAGE: Final = __name__.partition(".")[0]
_EARLY: Final = (
    "setup",
    "post_setup",
    "on_enter_fit",
    "on_enter_validate",
    "on_before_load_checkpoint",
    "preprocess_checkpoint",
    "on_load_trainer_state",
)
"""Hooks with which a callback may read weights before a checkpoint is loaded."""


def builds_without_values(own: ModelCallback) -> bool:
    """Return whether the model is of a class that draws all of its initial values by `reset_steps`.

    Classes of users may set values in their constructors, and so may interceptors.
    """
    made = getattr(own.model, "makes", None)
    is_able = getattr(made, "builds_without_values", False)
    return bool(is_able) and _is_of(made, _PACKAGE) and not functions_of(own)


def are_loaded_unread(trainer: Trainer) -> bool:
    """Return whether nothing reads the weights before the first checkpoint is loaded."""
    owner = trainer.optimizer_owner
    if any(functions_of(part) for part in (trainer, owner)):
        return False
    optimizers = [getattr(one, "makes", None) for one in owner.factories]
    if not all(_is_of(made, _PACKAGE, "torch") for made in optimizers):
        return False  # a constructor may copy weights
    return not any(map(_reads_early, trainer.all_callbacks))


def _reads_early(callback: Any) -> bool:
    for name in _EARLY:
        owner = next((kind for kind in type(callback).__mro__ if name in vars(kind)), Callback)
        if owner is Callback:
            continue
        is_ours = _is_of(owner, _PACKAGE)
        own = vars(owner).get("reads_weights_early", True)  # a base class of ours does not know
        if callback.reads_weights_early if is_ours else own:
            return True
    return False


def _is_of(made: Any, *packages: str) -> bool:
    """Return whether a class belongs to one of some packages."""
    return getattr(made, "__module__", "").partition(".")[0] in packages
