"""Takes only some of what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from modelzoo_trainer.callback import Callback, StateDict
from modelzoo_trainer.errors import CheckpointMismatch, ConfigError, suggest

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class LoadCheckpointStates(Callback):
    """Loads only the named parts of a checkpoint that a run is told to start from.

    With `model` alone, fine-tuning begins at step 0 with the weights of another run. A run that
    goes on from its own newest checkpoint takes all of it, so that a restart does not begin anew.

    Args:
        load_checkpoint_states: Names of top-level parts such as `model` and `optimizer`: a list,
            or a text with commas; "all" = everything.

    Raises:
        ConfigError: If no part is named.
        CheckpointMismatch: When loading, if the checkpoint has no such part.
    """

    def __init__(self, load_checkpoint_states: str | Iterable[str] = "all") -> None:
        given = load_checkpoint_states
        names = given.split(",") if isinstance(given, str) else list(given)
        self.states = tuple(name.strip() for name in names)
        if not self.states or not all(self.states):
            raise ConfigError(
                f"LoadCheckpointStates.load_checkpoint_states is {given!r}; name parts of a "
                f"checkpoint, such as 'model' or 'model,optimizer', or write 'all'."
            )
        self._is_own = False

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        self._is_own = trainer.checkpoint.is_own

    @override
    def preprocess_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if "all" in self.states or self._is_own:
            return
        for name in self.states:
            if name not in state_dict:
                raise CheckpointMismatch(
                    f"LoadCheckpointStates: the checkpoint has no part {name!r}. "
                    f"{suggest(name, state_dict, cutoff=0.75)}"
                )
        for name in set(state_dict) - set(self.states):
            del state_dict[name]
