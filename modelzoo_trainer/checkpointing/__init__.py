"""Checkpoints on disk: directories, committed atomically, verified when read, without pickle.

Independent of the trainer. The names below are imported lazily, so that `modelzoo-trainer
checkpoint list` starts quickly.
"""

from typing import TYPE_CHECKING, Final

from modelzoo_trainer.base.exports import lazy_exports

if TYPE_CHECKING:
    from modelzoo_trainer.checkpointing.background import BackgroundSaver
    from modelzoo_trainer.checkpointing.distributed import (
        CheckpointWriter,
        load_into,
        load_like,
        save_sharded,
    )
    from modelzoo_trainer.checkpointing.distributed_reader import CheckpointReader
    from modelzoo_trainer.checkpointing.finished import forget_deleted, is_finished, note_finished
    from modelzoo_trainer.checkpointing.folder import (
        CheckpointInfo,
        candidates,
        clean,
        delete,
        free_bytes,
        list_checkpoints,
        mend_latest,
        newest,
        point_latest,
        probe,
    )
    from modelzoo_trainer.checkpointing.lazy_tensors import LazyTensor, lazy_state
    from modelzoo_trainer.checkpointing.lazy_weights import LazyWeights, open_weights
    from modelzoo_trainer.checkpointing.load_save import load, save, verify
    from modelzoo_trainer.checkpointing.manifest import FileRecord, Manifest, read_manifest
    from modelzoo_trainer.checkpointing.shard_writing import CheckpointSavePlanner
    from modelzoo_trainer.checkpointing.state_json import check_savable, state_bytes
    from modelzoo_trainer.checkpointing.transaction import CheckpointTransaction
    from modelzoo_trainer.checkpointing.weight_readers import (
        WeightsReader,
        register_weights_reader,
    )
    from modelzoo_trainer.checkpointing.weights import (
        export,
        holds_weights,
        read_weights,
        write_weights,
    )

_HOMES: Final = {
    "checkpointing.background": ("BackgroundSaver",),
    "checkpointing.distributed": ("CheckpointWriter", "load_into", "load_like", "save_sharded"),
    "checkpointing.distributed_reader": ("CheckpointReader",),
    "checkpointing.finished": ("forget_deleted", "is_finished", "note_finished"),
    "checkpointing.folder": (
        *("CheckpointInfo", "candidates", "clean", "delete", "free_bytes", "list_checkpoints"),
        *("mend_latest", "newest", "point_latest", "probe"),
    ),
    "checkpointing.lazy_tensors": ("LazyTensor", "lazy_state"),
    "checkpointing.lazy_weights": ("LazyWeights", "open_weights"),
    "checkpointing.load_save": ("load", "save", "verify"),
    "checkpointing.manifest": ("FileRecord", "Manifest", "read_manifest"),
    "checkpointing.shard_writing": ("CheckpointSavePlanner",),
    "checkpointing.state_json": ("check_savable", "state_bytes"),
    "checkpointing.transaction": ("CheckpointTransaction",),
    "checkpointing.weight_readers": ("WeightsReader", "register_weights_reader"),
    "checkpointing.weights": ("export", "holds_weights", "read_weights", "write_weights"),
}

__all__ = [
    "BackgroundSaver",
    "CheckpointInfo",
    "CheckpointReader",
    "CheckpointSavePlanner",
    "CheckpointTransaction",
    "CheckpointWriter",
    "FileRecord",
    "LazyTensor",
    "LazyWeights",
    "Manifest",
    "WeightsReader",
    "candidates",
    "check_savable",
    "clean",
    "delete",
    "export",
    "forget_deleted",
    "free_bytes",
    "holds_weights",
    "is_finished",
    "lazy_state",
    "list_checkpoints",
    "load",
    "load_into",
    "load_like",
    "mend_latest",
    "newest",
    "note_finished",
    "open_weights",
    "point_latest",
    "probe",
    "read_manifest",
    "read_weights",
    "register_weights_reader",
    "save",
    "save_sharded",
    "state_bytes",
    "verify",
    "write_weights",
]


if not TYPE_CHECKING:  # else a checker would accept any name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
