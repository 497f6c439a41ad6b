"""Checkpoints on disk: directories that are committed whole, verified when read; no pickle.

Knows nothing of the trainer.
"""

from modelzoo_trainer.checkpointing.listing import CheckpointInfo, list_checkpoints, newest
from modelzoo_trainer.checkpointing.manifest import Manifest, read_manifest, verify
from modelzoo_trainer.checkpointing.read import load
from modelzoo_trainer.checkpointing.write import save

__all__ = [
    "CheckpointInfo",
    "Manifest",
    "list_checkpoints",
    "load",
    "newest",
    "read_manifest",
    "save",
    "verify",
]
