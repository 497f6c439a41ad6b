"""What is done to a folder of checkpoints while its disk fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from modelzoo_trainer import checkpointing
from modelzoo_trainer.checkpointing import weights
from tests.reliability.states import state_of

OLD: Final = "checkpoint_1"
NEW: Final = "checkpoint_2"
EXPORTED: Final = "exported.safetensors"


def save(folder: Path) -> None:
    """Write a second checkpoint."""
    checkpointing.save(folder / NEW, state_of(2), step=2)


def save_later(folder: Path) -> None:
    """Write a second checkpoint in the background."""
    saver = checkpointing.BackgroundSaver()
    saver.save(folder / NEW, state_of(2), step=2)
    saver.wait()


def prune(folder: Path) -> None:
    """Delete the older one of two."""
    checkpointing.delete(folder / OLD)


def export(folder: Path) -> None:
    """Write the model of a checkpoint to a file."""
    weights.export(folder / OLD, folder / EXPORTED)


DEEDS: Final[dict[str, Callable[[Path], None]]] = {
    "save": save,
    "save_later": save_later,
    "prune": prune,
    "export": export,
}
