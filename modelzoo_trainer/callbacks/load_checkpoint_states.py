"""Loading of selected parts of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from modelzoo_trainer.callback import Callback, Loader, StateDict
from modelzoo_trainer.callbacks.parts.side_checkpoints import part_names, require_parts
from modelzoo_trainer.errors import CheckpointMismatch

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class LoadCheckpointStates(Callback):
    """Load only the named parts of the checkpoint that a run starts from.

    With `model` only, fine-tuning begins at step 0 with the weights of another run. A run that
    resumes from its own newest checkpoint loads all of it, so that a restart or a rollback does not
    start over.

    Args:
        load_checkpoint_states: Names of top-level parts such as `model` and `optimizer`: a list or
            a comma-separated string; "all" = everything.

    Raises:
        ConfigError: If no part is named.
        CheckpointMismatch: On loading, if the checkpoint lacks a part.
    """

    def __init__(self, load_checkpoint_states: str | Iterable[str] = "all") -> None:
        self.states = part_names(
            "LoadCheckpointStates.load_checkpoint_states", load_checkpoint_states
        )
        self._is_own = False
        self._has_begun = False

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        stack.callback(self._leave)

    def _leave(self) -> None:
        self._has_begun = False

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._has_begun = True

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        goes_back = trainer.is_resuming and self._has_begun
        self._is_own = trainer.checkpoint.is_own or goes_back

    @override
    def preprocess_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if "all" in self.states or self._is_own:
            return
        trainer.checkpoint.load_parts()
        what = "LoadCheckpointStates: the checkpoint"
        require_parts(what, state_dict, self.states, CheckpointMismatch)
        for name in set(state_dict) - set(self.states):
            del state_dict[name]
