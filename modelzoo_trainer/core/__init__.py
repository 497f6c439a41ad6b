"""The core callbacks: each owns one thing of a trainer and is its only writer."""

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
