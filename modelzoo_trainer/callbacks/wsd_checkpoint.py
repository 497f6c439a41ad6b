"""Checkpoints before and after the decay of a WSD schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer.base.constraints import checked
from modelzoo_trainer.callback import Callback, Loader
from modelzoo_trainer.callbacks.parts.side_checkpoints import (
    SideCheckpoints,
    SideFolder,
    StepName,
    check_is_directory,
)
from modelzoo_trainer.checkpointing.manifest import SUFFIX
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_STABLE: Final = "WSDCheckpoint.stable_name"


class WSDCheckpoint(Callback):
    """Write a full checkpoint before each decay of `WarmupStableDecay`, and the weights after it.

    The first is a checkpoint to continue training from, with a larger `total_iters`:
    `fit(ckpt_path=...)`. The second is a `.safetensors` file of the final model. A run never
    resumes from them automatically, and they are never deleted. If one cannot be written, an error
    is logged; the run continues.

    Args:
        folder: Folder of the files; a path within `model_dir`.
        stable_name: Name pattern of the first; contains the field `{step}` once.
        decayed_name: Name pattern of the second, without suffix; contains `{step}` once.

    State: Whether the run was resumed, so that files that are written again are replaced.

    Cost: Training waits for both writes at each decay.

    Raises:
        ConfigError: If a name is invalid; at setup, if no scheduler has decays.
    """

    state_is_of_run = True

    @checked()
    def __init__(
        self,
        folder: SideFolder = "wsd",
        stable_name: StepName = "stable_{step}",
        decayed_name: StepName = "decayed_{step}",
    ) -> None:
        check_is_directory(_STABLE, stable_name)
        self._stable = stable_name
        self._decayed = decayed_name + SUFFIX
        self._side = SideCheckpoints("WSDCheckpoint", folder)
        self._begins: frozenset[int] = frozenset()
        self._ends: frozenset[int] = frozenset()
        self._is_resumed = False

    @override
    def post_setup(self, trainer: Trainer) -> None:
        trainer.object_store.refuse_if_split(trainer, "WSDCheckpoint makes files of weights")
        self._side.check_is_apart(_STABLE, trainer, self._stable)
        if len(trainer.get_callbacks(WSDCheckpoint)) > 1:
            raise ConfigError("There are two WSDCheckpoint callbacks. Remove one.")
        found = [
            scheduler.get_checkpoint_steps()
            for scheduler in trainer.schedulers
            if hasattr(scheduler, "get_checkpoint_steps")
        ]
        if not found:
            names = ", ".join(type(one).__name__ for one in trainer.schedulers) or "none"
            raise ConfigError(
                f"WSDCheckpoint requires a scheduler with the method get_checkpoint_steps, such as "
                f"WarmupStableDecay. The trainer's schedulers: {names}."
            )
        pairs = [pair for steps in found for pair in steps]
        self._begins = frozenset(begin for begin, _ in pairs)
        self._ends = frozenset(end for _, end in pairs)

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._side.prepare(trainer)

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        step = trainer.global_step
        for steps, template in ((self._ends, self._decayed), (self._begins, self._stable)):
            if step in steps:
                name = template.format(step=step)
                self._side.write(trainer, name, replaces=self._is_resumed)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return that there is a run to resume."""
        return {"is_resumed": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace existing files from now on."""
        self._is_resumed = state["is_resumed"]
