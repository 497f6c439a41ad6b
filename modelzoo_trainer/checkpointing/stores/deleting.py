"""Delete checkpoints from a store: noted at once, repeated there by the next upload."""

from __future__ import annotations

from pathlib import Path

from modelzoo_trainer.base.regular_files import read_bytes
from modelzoo_trainer.checkpointing.stores.mirror import MANIFEST, attempt_of, located
from modelzoo_trainer.checkpointing.stores.record import note_deleted


def forget(path: Path) -> None:
    """Note that a checkpoint is to be deleted from its store; a no-op outside of a mirror.

    Does not use the network: the next upload deletes it there.

    Raises:
        OSError: If it cannot be noted.
    """
    mirror, name = located(path)
    if mirror is not None and name and (path / MANIFEST).is_file():
        note_deleted(mirror.folder, name, attempt_of(read_bytes(path / MANIFEST)))
