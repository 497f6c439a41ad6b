"""Copies of selected parts of checkpoints."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from annotated_types import Predicate
from typing_extensions import override

from modelzoo_trainer import checkpointing
from modelzoo_trainer.base.constraints import PositiveInt, checked
from modelzoo_trainer.callback import Callback, Loader, StateDict
from modelzoo_trainer.callbacks.parts.side_checkpoints import (
    check_is_apart,
    holds_once,
    is_of_run,
    part_names,
    parts_of,
)
from modelzoo_trainer.errors import CheckpointError, StoreError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.checkpoint")

_STATES: Final = "SaveCheckpointState.checkpoint_states"
StateName = Annotated[
    str,
    Predicate(lambda name: holds_once(name, "checkpoint_states", "ckpt_name")),
    "a file name with {checkpoint_states} and {ckpt_name}, once",
]


class SaveCheckpointState(Callback):
    """Save selected parts of every k-th checkpoint, and of the final one, as a second checkpoint.

    It is written beside the first one; a run never resumes from it automatically, and
    `KeepNCheckpoints` does not delete it. If it cannot be written, a warning is logged.

    Args:
        k: On every k-th checkpoint, > 0; those before a restart count.
        checkpoint_states: Names of top-level parts such as `model` and `optimizer`: a list or a
            comma-separated string. Parts whose names begin with two underscores are always saved.
        checkpoint_name: Name pattern; contains the fields `{checkpoint_states}` (the parts, joined
            by "_") and `{ckpt_name}` (the name of the first checkpoint).

    State: The number of checkpoints that were written.

    Cost: Reads each k-th checkpoint back completely, verified, into host memory.

    Raises:
        ConfigError: If `k` is not positive, no part is named, or the name lacks a field; at the
            first checkpoint, if the run's checkpoints lack a part.
    """

    state_is_of_run = True

    @checked()
    def __init__(
        self,
        k: PositiveInt,
        checkpoint_states: str | list[str] = "model",
        checkpoint_name: StateName = "{checkpoint_states}_{ckpt_name}",
    ) -> None:
        self._k = k
        self.states = part_names(_STATES, checkpoint_states)
        self._template = checkpoint_name
        self._num_saved = 0
        self._newest: Path | None = None
        self._loaded: Path | None = None

    @override
    def setup(self, trainer: Trainer) -> None:
        example = self._name(trainer.checkpoint.checkpoint_name.format(step=0))
        check_is_apart("SaveCheckpointState.checkpoint_name", trainer, example)

    def _name(self, ckpt_name: str) -> str:
        return self._template.format(checkpoint_states="_".join(self.states), ckpt_name=ckpt_name)

    # ---- when

    @override
    def postprocess_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        parts_of(_STATES, state_dict, self.states)

    @override
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        self._num_saved += 1
        self._newest = ckpt_path
        self._write_if_due(trainer)

    def _write_if_due(self, trainer: Trainer) -> None:
        if self._num_saved and self._num_saved % self._k == 0:
            self._write_newest(trainer)

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._write_if_due(trainer)  # after a crash between the checkpoint and its copy

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        if trainer.interrupted is None:
            self._write_newest(trainer)

    # ---- writing

    def _write_newest(self, trainer: Trainer) -> None:
        source, self._newest = self._newest, None
        if source is None or not trainer.backend.comm.is_main:
            return
        path = source.with_name(self._name(source.name))
        if os.path.lexists(path):
            return
        try:
            state = checkpointing.load(source)
            step = checkpointing.read_manifest(source).step
            checkpointing.save(path, parts_of(_STATES, state, self.states), step=step)
        except (CheckpointError, StoreError) as error:
            log.warning("Cannot write %s: %s", path, error)
        else:
            log.info("Saved %s of checkpoint %s as %s.", ", ".join(self.states), source, path.name)

    # ---- after a restart

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        if ckpt_path is not None:
            self._loaded = ckpt_path if is_of_run(trainer, ckpt_path.name) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of checkpoints, without the one being written."""
        return {"num_saved": self._num_saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of checkpoints."""
        self._num_saved = state["num_saved"]
        if self._loaded is not None:
            self._num_saved += 1
            self._newest = self._loaded
