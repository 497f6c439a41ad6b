"""The core callbacks: each owns one thing and is its only writer.

They are imported when they are first used: `parts` has modules that need no torch.
"""

from typing import TYPE_CHECKING, Final

from modelzoo_trainer.base.exports import lazy_exports

if TYPE_CHECKING:
    from modelzoo_trainer.core.artifact_dir import ArtifactDir
    from modelzoo_trainer.core.attribute_states import AttributeStates
    from modelzoo_trainer.core.autorestart import AutoRestart
    from modelzoo_trainer.core.backend import BackendCallback
    from modelzoo_trainer.core.checkpoint import Checkpoint
    from modelzoo_trainer.core.dataloader import DataLoaderCallback
    from modelzoo_trainer.core.early_exit import EarlyExit
    from modelzoo_trainer.core.grad_accum import GradientAccumulation
    from modelzoo_trainer.core.interrupt import Interrupt
    from modelzoo_trainer.core.logging import Logging
    from modelzoo_trainer.core.loop import LoopCallback, TrainingLoop, ValidationLoop
    from modelzoo_trainer.core.loss_accum import LossAccumulation
    from modelzoo_trainer.core.model import ModelCallback
    from modelzoo_trainer.core.object_store import ObjectStore
    from modelzoo_trainer.core.optimizer import OptimizerCallback
    from modelzoo_trainer.core.precision import MixedPrecision, Precision
    from modelzoo_trainer.core.predicting import Predicting
    from modelzoo_trainer.core.reproducibility import Reproducibility
    from modelzoo_trainer.core.run_lock import RunLock
    from modelzoo_trainer.core.run_schedule import RunSchedule
    from modelzoo_trainer.core.schedulers import SchedulersCallback
    from modelzoo_trainer.core.sparsity import Sparsity
    from modelzoo_trainer.core.summary import Summary

_HOMES: Final = {
    "core.artifact_dir": ("ArtifactDir",),
    "core.attribute_states": ("AttributeStates",),
    "core.autorestart": ("AutoRestart",),
    "core.backend": ("BackendCallback",),
    "core.checkpoint": ("Checkpoint",),
    "core.dataloader": ("DataLoaderCallback",),
    "core.early_exit": ("EarlyExit",),
    "core.grad_accum": ("GradientAccumulation",),
    "core.interrupt": ("Interrupt",),
    "core.logging": ("Logging",),
    "core.loop": ("LoopCallback", "TrainingLoop", "ValidationLoop"),
    "core.loss_accum": ("LossAccumulation",),
    "core.model": ("ModelCallback",),
    "core.object_store": ("ObjectStore",),
    "core.optimizer": ("OptimizerCallback",),
    "core.precision": ("MixedPrecision", "Precision"),
    "core.predicting": ("Predicting",),
    "core.reproducibility": ("Reproducibility",),
    "core.run_lock": ("RunLock",),
    "core.run_schedule": ("RunSchedule",),
    "core.schedulers": ("SchedulersCallback",),
    "core.sparsity": ("Sparsity",),
    "core.summary": ("Summary",),
}

__all__ = [
    "ArtifactDir",
    "AttributeStates",
    "AutoRestart",
    "BackendCallback",
    "Checkpoint",
    "DataLoaderCallback",
    "EarlyExit",
    "GradientAccumulation",
    "Interrupt",
    "Logging",
    "LoopCallback",
    "LossAccumulation",
    "MixedPrecision",
    "ModelCallback",
    "ObjectStore",
    "OptimizerCallback",
    "Precision",
    "Predicting",
    "Reproducibility",
    "RunLock",
    "RunSchedule",
    "SchedulersCallback",
    "Sparsity",
    "Summary",
    "TrainingLoop",
    "ValidationLoop",
]

if not TYPE_CHECKING:  # else a checker would accept any name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
