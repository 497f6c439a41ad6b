"""The state of an optimizer in checkpoints, with settings to compare."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from torch.optim import Optimizer

from modelzoo_trainer.checkpointing.restoring import check_optimizer, check_steps, group_kinds
from modelzoo_trainer.core.parts.optimizer_facts import (
    Names,
    Settings,
    changes,
    check_names,
    check_shapes,
    names_of,
    settings_of,
)
from modelzoo_trainer.core.parts.scheduler_settings import scheduled_keys
from modelzoo_trainer.errors import OF_ANOTHER_RUN, ONLY_MODEL, CheckpointMismatch

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.optimizer")

_KIND: Final = "kind"  # keys beside those of torch
_NAMES: Final = "names"
_SETTINGS: Final = "settings"


class OptimizerState:
    """Save and restore one optimizer of a trainer.

    `label`: its name in messages, such as "optimizer".
    """

    def __init__(self, optimizer: Optimizer, label: str) -> None:
        self.optimizer = optimizer
        """The optimizer, replaced once the backend has prepared it."""
        self.label = label
        self._given: Settings = settings_of(optimizer)
        self._held: Settings | None = self._given
        self._reported = ""
        self._named: tuple[list[int], Names | None] | None = None

    def save(self, trainer: Trainer) -> Any:
        """Return the state for a checkpoint; tensors share memory with the run."""
        state = trainer.backend.state_view(self.optimizer.state_dict())
        state |= {_KIND: type(self.optimizer).__name__}
        names = self._names(trainer)
        if names is not None:
            state[_NAMES] = names
        if self._held is not None:
            state[_SETTINGS] = self._held
        return state

    def _names(self, trainer: Trainer) -> Names | None:
        """Return the names of the parameters, updated if groups were added."""
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        if self._named is None or self._named[0] != sizes:
            self._named = sizes, names_of(trainer.model, self.optimizer)
        return self._named[1]

    def load(self, trainer: Trainer, saved: Mapping[str, Any], schedulers: list[Any]) -> None:
        """Restore a state; warn about settings that differ from the checkpoint's.

        `schedulers`: this optimizer's.

        Raises:
            CheckpointMismatch: If it is of another class, or for other parameters.
        """
        state, optimizer = dict(saved), self.optimizer
        own = type(optimizer).__name__
        kind = state.pop(_KIND, own)  # the first format does not say
        if kind != own:
            raise CheckpointMismatch(
                f"The checkpoint has {kind} as {self.label}, but this run has {own}. "
                f"Use {kind}. {OF_ANOTHER_RUN} {ONLY_MODEL}"
            )
        names, before = self._names(trainer), state.pop(_NAMES, None)
        if names and before and state["state"]:
            check_names(names, before, self.label)
        settings = state.pop(_SETTINGS, None)
        is_alone = trainer.backend.comm.world_size == 1
        check_shapes(optimizer, state, names, self.label, is_alone=is_alone)
        check_steps(state)
        before_load = group_kinds(optimizer)
        try:
            optimizer.load_state_dict(state)
        except ValueError as error:
            raise CheckpointMismatch(
                f"the checkpoint's {self.label} does not fit {own}: {error}. Use the original "
                f"optimizer and parameter groups. {OF_ANOTHER_RUN} {ONLY_MODEL}"
            ) from None
        check_optimizer(optimizer, before_load)
        self._held = settings
        if settings is not None:
            self._warn_of_changes(changes(self._given, settings, scheduled_keys(schedulers)))

    def _warn_of_changes(self, changed: str) -> None:
        """Warn about settings that differ from the checkpoint's, once."""
        if changed and changed != self._reported:
            log.warning(
                "%s: %s. Using the checkpoint's settings. To use the new ones, set "
                "optimizer.param_groups in a callback's on_fit_start, or load only the model with "
                "LoadCheckpointStates.",
                self.label,
                changed,
            )
        self._reported = changed
