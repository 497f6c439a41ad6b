"""Add-on callbacks, one file each; the core callbacks can be imported from here, too.

`__all__` is the registry: a YAML file may name its classes under `callbacks`. Their modules are
imported when they are first used. Those for kinds of models are part of the zoo; those that test or
report a run are tools.
"""

from typing import TYPE_CHECKING, Any, Final

from modelzoo_trainer.base.exports import lazy_exports
from modelzoo_trainer.base.foreign_names import CALLBACKS as _FOREIGN
from modelzoo_trainer.base.foreign_names import advice_for as _advice_for

if TYPE_CHECKING:
    from modelzoo_trainer.callback import Callback as Callback
    from modelzoo_trainer.callback import CoreCallback as CoreCallback
    from modelzoo_trainer.callback import ValidationCallback as ValidationCallback
    from modelzoo_trainer.callback import register_global_callback
    from modelzoo_trainer.callbacks.check_loss import CheckLoss
    from modelzoo_trainer.callbacks.compute_norm import ComputeNorm
    from modelzoo_trainer.callbacks.count_params import CountParams
    from modelzoo_trainer.callbacks.dump_activations import DumpActivations
    from modelzoo_trainer.callbacks.dump_available_tensor_names import DumpAvailableTensorNames
    from modelzoo_trainer.callbacks.early_stopping import EarlyStopping
    from modelzoo_trainer.callbacks.extra_checkpoint import ExtraCheckpoint
    from modelzoo_trainer.callbacks.flop_utilization import FlopUtilization
    from modelzoo_trainer.callbacks.keep_n_checkpoints import KeepNCheckpoints
    from modelzoo_trainer.callbacks.limit_batches import LimitBatches, LimitEvalSteps
    from modelzoo_trainer.callbacks.load_checkpoint_states import LoadCheckpointStates
    from modelzoo_trainer.callbacks.log_metrics import (
        LogInputSummaries,
        LogMetrics,
        LogOptimizerParamGroup,
        LogSparsity,
    )
    from modelzoo_trainer.callbacks.model_ema import ModelEma
    from modelzoo_trainer.callbacks.model_eval_metrics import ModelEvalMetrics
    from modelzoo_trainer.callbacks.nan_checker import NaNChecker
    from modelzoo_trainer.callbacks.op_profiler import OpProfiler
    from modelzoo_trainer.callbacks.parts.tensor_listeners import (
        NormTensorListener,
        SummaryTensorListener,
    )
    from modelzoo_trainer.callbacks.profiler import DurationProfiler, RateProfiler
    from modelzoo_trainer.callbacks.profiler import Profiler as Profiler
    from modelzoo_trainer.callbacks.progress import PrintProgress, ProgressBar
    from modelzoo_trainer.callbacks.samples_streamed_info import SamplesStreamedInfo
    from modelzoo_trainer.callbacks.save_best import SaveBest
    from modelzoo_trainer.callbacks.save_checkpoint_state import SaveCheckpointState
    from modelzoo_trainer.callbacks.save_performance_data import SavePerformanceData
    from modelzoo_trainer.callbacks.selective_grad import SelectiveGrad
    from modelzoo_trainer.callbacks.skip_samples import SkipSamples
    from modelzoo_trainer.callbacks.spike_detection import SpikeDetection
    from modelzoo_trainer.callbacks.step_based_evaluation import StepBasedEvaluation
    from modelzoo_trainer.callbacks.terminate_on_nan import TerminateOnNaN
    from modelzoo_trainer.callbacks.wsd_checkpoint import WSDCheckpoint
    from modelzoo_trainer.core import Checkpoint as Checkpoint
    from modelzoo_trainer.core import Logging as Logging
    from modelzoo_trainer.core import MixedPrecision as MixedPrecision
    from modelzoo_trainer.core import TrainingLoop as TrainingLoop
    from modelzoo_trainer.core import ValidationLoop as ValidationLoop
    from modelzoo_trainer.tools.launch.ray_train_report import RayTrainReport
    from modelzoo_trainer.tools.lr_finder import LRFinder
    from modelzoo_trainer.tools.notification import EmailNotification, SlackNotification
    from modelzoo_trainer.tools.report.callback import Report
    from modelzoo_trainer.tools.report.run_history import RunHistory
    from modelzoo_trainer.zoo.callbacks.compute_norm_gns import ComputeNormGNS
    from modelzoo_trainer.zoo.callbacks.csx_noops import (
        DebugArgsPath,
        HFCacheDir,
        WeightCompression,
    )
    from modelzoo_trainer.zoo.callbacks.eleuther_eval_harness import EleutherEvalHarness
    from modelzoo_trainer.zoo.callbacks.expert_load import LogExpertLoad
    from modelzoo_trainer.zoo.callbacks.flags import (
        GlobalFlags,
        ScopedBigCodeEvalHarnessFlags,
        ScopedEleutherEvalHarnessFlags,
        ScopedTrainFlags,
        ScopedValidateFlags,
    )
    from modelzoo_trainer.zoo.callbacks.generate_text import GenerateText
    from modelzoo_trainer.zoo.callbacks.hugging_face_checkpoint import HuggingFaceCheckpoint
    from modelzoo_trainer.zoo.callbacks.lora import Lora
    from modelzoo_trainer.zoo.callbacks.model_zoo_params_metadata import ModelZooParamsMetadata
    from modelzoo_trainer.zoo.callbacks.move_modules import (
        ConvertSyncBatchNorm,
        MoveModulesToDevice,
    )

_HOMES: Final = {
    "callback": ("Callback", "CoreCallback", "ValidationCallback", "register_global_callback"),
    "callbacks.check_loss": ("CheckLoss",),
    "callbacks.compute_norm": ("ComputeNorm",),
    "callbacks.count_params": ("CountParams",),
    "callbacks.dump_activations": ("DumpActivations",),
    "callbacks.dump_available_tensor_names": ("DumpAvailableTensorNames",),
    "callbacks.early_stopping": ("EarlyStopping",),
    "callbacks.extra_checkpoint": ("ExtraCheckpoint",),
    "callbacks.flop_utilization": ("FlopUtilization",),
    "callbacks.keep_n_checkpoints": ("KeepNCheckpoints",),
    "callbacks.limit_batches": ("LimitBatches", "LimitEvalSteps"),
    "callbacks.load_checkpoint_states": ("LoadCheckpointStates",),
    "callbacks.log_metrics": (
        "LogInputSummaries",
        "LogMetrics",
        "LogOptimizerParamGroup",
        "LogSparsity",
    ),
    "callbacks.model_ema": ("ModelEma",),
    "callbacks.model_eval_metrics": ("ModelEvalMetrics",),
    "callbacks.nan_checker": ("NaNChecker",),
    "callbacks.op_profiler": ("OpProfiler",),
    "callbacks.parts.tensor_listeners": ("NormTensorListener", "SummaryTensorListener"),
    "callbacks.profiler": ("DurationProfiler", "Profiler", "RateProfiler"),
    "callbacks.progress": ("PrintProgress", "ProgressBar"),
    "callbacks.samples_streamed_info": ("SamplesStreamedInfo",),
    "callbacks.save_best": ("SaveBest",),
    "callbacks.save_checkpoint_state": ("SaveCheckpointState",),
    "callbacks.save_performance_data": ("SavePerformanceData",),
    "callbacks.selective_grad": ("SelectiveGrad",),
    "callbacks.skip_samples": ("SkipSamples",),
    "callbacks.spike_detection": ("SpikeDetection",),
    "callbacks.step_based_evaluation": ("StepBasedEvaluation",),
    "callbacks.terminate_on_nan": ("TerminateOnNaN",),
    "callbacks.wsd_checkpoint": ("WSDCheckpoint",),
    "core": ("Checkpoint", "Logging", "MixedPrecision", "TrainingLoop", "ValidationLoop"),
    "tools.launch.ray_train_report": ("RayTrainReport",),
    "tools.lr_finder": ("LRFinder",),
    "tools.notification": ("EmailNotification", "SlackNotification"),
    "tools.report.callback": ("Report",),
    "tools.report.run_history": ("RunHistory",),
    "zoo.callbacks.compute_norm_gns": ("ComputeNormGNS",),
    "zoo.callbacks.csx_noops": ("DebugArgsPath", "HFCacheDir", "WeightCompression"),
    "zoo.callbacks.eleuther_eval_harness": ("EleutherEvalHarness",),
    "zoo.callbacks.expert_load": ("LogExpertLoad",),
    "zoo.callbacks.flags": (
        "GlobalFlags",
        "ScopedBigCodeEvalHarnessFlags",
        "ScopedEleutherEvalHarnessFlags",
        "ScopedTrainFlags",
        "ScopedValidateFlags",
    ),
    "zoo.callbacks.generate_text": ("GenerateText",),
    "zoo.callbacks.hugging_face_checkpoint": ("HuggingFaceCheckpoint",),
    "zoo.callbacks.lora": ("Lora",),
    "zoo.callbacks.model_zoo_params_metadata": ("ModelZooParamsMetadata",),
    "zoo.callbacks.move_modules": ("ConvertSyncBatchNorm", "MoveModulesToDevice"),
}

__all__ = [
    "CheckLoss",
    "ComputeNorm",
    "ComputeNormGNS",
    "ConvertSyncBatchNorm",
    "CountParams",
    "DebugArgsPath",
    "DumpActivations",
    "DumpAvailableTensorNames",
    "DurationProfiler",
    "EarlyStopping",
    "EleutherEvalHarness",
    "EmailNotification",
    "ExtraCheckpoint",
    "FlopUtilization",
    "GenerateText",
    "GlobalFlags",
    "HFCacheDir",
    "HuggingFaceCheckpoint",
    "KeepNCheckpoints",
    "LRFinder",
    "LimitBatches",
    "LimitEvalSteps",
    "LoadCheckpointStates",
    "LogExpertLoad",
    "LogInputSummaries",
    "LogMetrics",
    "LogOptimizerParamGroup",
    "LogSparsity",
    "Lora",
    "ModelEma",
    "ModelEvalMetrics",
    "ModelZooParamsMetadata",
    "MoveModulesToDevice",
    "NaNChecker",
    "NormTensorListener",
    "OpProfiler",
    "PrintProgress",
    "ProgressBar",
    "RateProfiler",
    "RayTrainReport",
    "Report",
    "RunHistory",
    "SamplesStreamedInfo",
    "SaveBest",
    "SaveCheckpointState",
    "SavePerformanceData",
    "ScopedBigCodeEvalHarnessFlags",
    "ScopedEleutherEvalHarnessFlags",
    "ScopedTrainFlags",
    "ScopedValidateFlags",
    "SelectiveGrad",
    "SkipSamples",
    "SlackNotification",
    "SpikeDetection",
    "StepBasedEvaluation",
    "SummaryTensorListener",
    "TerminateOnNaN",
    "WSDCheckpoint",
    "WeightCompression",
    "default_callbacks",
    "register_global_callback",
]


def default_callbacks() -> "list[Callback]":
    """Return new instances of the callbacks that a YAML file gets by default."""
    from modelzoo_trainer import callbacks

    return [
        callbacks.CheckLoss(),
        callbacks.LogOptimizerParamGroup("lr"),
        callbacks.ComputeNorm(),
        callbacks.ModelEvalMetrics(),
        callbacks.RateProfiler(),
        callbacks.DurationProfiler(),
        callbacks.SavePerformanceData(),
        callbacks.ModelZooParamsMetadata(),
    ]


_find, __dir__ = lazy_exports(__name__, _HOMES)

if not TYPE_CHECKING:  # else a checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _FOREIGN:  # an AttributeError would lose the text in `from ... import`
            missing = f"module {__name__!r} has no attribute {name!r}"
            raise ImportError(f"{missing}. {_advice_for(_FOREIGN, name)}")
        return _find(name)
