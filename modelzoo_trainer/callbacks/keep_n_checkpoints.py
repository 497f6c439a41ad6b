"""Deletion of old checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from modelzoo_trainer.base.constraints import PositiveInt, checked
from modelzoo_trainer.callback import Callback, Loader
from modelzoo_trainer.callbacks.parts.side_checkpoints import is_of_run, remove

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class KeepNCheckpoints(Callback):
    """Keep only the newest n checkpoints of the run; delete older ones.

    Only checkpoints that were written while this callback was present are deleted, by this run or
    by the one that it resumes, and only after a newer one has been committed: the checkpoint that a
    run resumes from is kept until then. If one cannot be deleted, a warning is logged.

    Args:
        n: Number of checkpoints to keep, > 0; None = all.

    State: The names of the remaining checkpoints.

    Raises:
        ConfigError: If `n` is not positive.
    """

    @checked()
    def __init__(self, n: PositiveInt | None = None) -> None:
        self._n = n
        self._kept: list[str] = []
        self._written: set[str] = set()
        self._loaded: str | None = None
        self._is_foreign = False

    @override
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        root, new = ckpt_path.parent, ckpt_path.name
        others = [name for name in self._kept if name != new and os.path.lexists(root / name)]
        self._kept = [*others, new]
        self._written.add(new)
        self._delete_old(trainer, root)

    def _delete_old(self, trainer: Trainer, root: Path) -> None:
        while self._n is not None and len(self._kept) > self._n:
            old = self._kept.pop(0)
            self._written.discard(old)
            if trainer.backend.comm.is_main:
                remove(root / old)

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        # The state in a checkpoint is from before its commit, after which the oldest one is
        # deleted; a run that was killed in between has left it.
        root = trainer.checkpoint.root(trainer)
        self._kept = [name for name in self._kept if os.path.lexists(root / name)]
        if self._loaded is not None:
            self._delete_old(trainer, root)

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        if ckpt_path is None:
            return
        self._is_foreign = not trainer.checkpoint.is_in_folder(trainer, ckpt_path)
        self._loaded = ckpt_path.name if is_of_run(trainer, ckpt_path.name) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the checkpoints, without the one being written."""
        return {"kept": list(self._kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adopt the checkpoints of the run that is resumed, if it is in the same folder."""
        taken: list[str] = []
        if not self._is_foreign:  # the checkpoints of another run are never deleted
            taken = [Path(name).name for name in state["kept"]]
            taken += [] if self._loaded is None else [self._loaded]
        here = [name for name in self._kept if name in self._written]
        self._kept = list(dict.fromkeys([*taken, *here]))
