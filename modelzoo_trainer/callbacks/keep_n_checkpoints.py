"""Deletes old checkpoints."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from modelzoo_trainer.callback import Callback
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.checkpoint")


class KeepNCheckpoints(Callback):
    """Keeps the newest checkpoints of this run and deletes those before.

    Only checkpoints that were written while this callback was there are deleted, by this run or
    by the one that it resumes, and only when a newer one has been committed. A failure to delete
    is logged; the run goes on.

    Args:
        n: How many to keep, > 0; None = all.

    State: The names of the checkpoints that are left.

    Raises:
        ConfigError: If `n` is not positive.
    """

    def __init__(self, n: int | None = None) -> None:
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
            raise ConfigError(f"n is {n!r}; it must be a whole number > 0, or null to keep all.")
        self._n = n
        self._kept: list[Path] = []
        self._root: Path | None = None
        self._loaded: Path | None = None

    @override
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        if ckpt_path in self._kept:
            self._kept.remove(ckpt_path)
        self._kept.append(ckpt_path)
        while self._n is not None and len(self._kept) > self._n:
            old = self._kept.pop(0)
            if trainer.backend.is_main:
                _delete(old)

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        self._root = trainer.checkpoint.root(trainer)
        self._loaded = ckpt_path

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the checkpoints so far; the one being written is not among them."""
        return {"kept": [path.name for path in self._kept]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the checkpoints of the run that is resumed, if it is in the same folder."""
        if self._loaded is None or self._root is None:
            return
        if self._loaded.resolve().parent != self._root.resolve():
            return  # another run's: this one starts from it, but does not own it
        taken = [self._root / Path(name).name for name in state["kept"]]
        taken.append(self._root / self._loaded.name)
        taken = [path for path in dict.fromkeys(taken) if path.exists()]
        self._kept = [path for path in taken if path not in self._kept] + self._kept


def _delete(path: Path) -> None:
    """Delete a checkpoint: renamed first, so that no half of one is left under its name."""
    doomed = path.with_name(f".{path.name}.deleted")
    try:
        path.rename(doomed)
        if doomed.is_dir():
            shutil.rmtree(doomed)
        else:
            doomed.unlink()
    except FileNotFoundError:
        pass  # somebody else has deleted it
    except OSError as error:
        log.warning("Checkpoint %s could not be deleted: %s", path, error)
    else:
        log.info("Deleted checkpoint %s.", path)
