"""Add-on callbacks, one file each; the core callbacks can be imported from here, too.

`__all__` is the registry: a YAML file may name its classes under `callbacks`.
"""

from typing import TYPE_CHECKING, Any

from modelzoo_trainer.base.foreign_names import CALLBACKS as _FOREIGN
from modelzoo_trainer.base.foreign_names import advice_for as _advice_for
from modelzoo_trainer.callback import Callback as Callback
from modelzoo_trainer.callback import CoreCallback as CoreCallback
from modelzoo_trainer.callback import ValidationCallback as ValidationCallback
from modelzoo_trainer.callback import register_global_callback
from modelzoo_trainer.callbacks.check_loss import CheckLoss
from modelzoo_trainer.callbacks.compute_norm import ComputeNorm
from modelzoo_trainer.callbacks.compute_norm_gns import ComputeNormGNS
from modelzoo_trainer.callbacks.count_params import CountParams
from modelzoo_trainer.callbacks.dump_activations import DumpActivations
from modelzoo_trainer.callbacks.dump_available_tensor_names import DumpAvailableTensorNames
from modelzoo_trainer.callbacks.early_stopping import EarlyStopping
from modelzoo_trainer.callbacks.extra_checkpoint import ExtraCheckpoint
from modelzoo_trainer.callbacks.flags import (
    GlobalFlags,
    ScopedBigCodeEvalHarnessFlags,
    ScopedEleutherEvalHarnessFlags,
    ScopedTrainFlags,
    ScopedValidateFlags,
)
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
from modelzoo_trainer.callbacks.lr_finder import LRFinder
from modelzoo_trainer.callbacks.model_ema import ModelEma
from modelzoo_trainer.callbacks.model_eval_metrics import ModelEvalMetrics
from modelzoo_trainer.callbacks.model_zoo_params_metadata import ModelZooParamsMetadata
from modelzoo_trainer.callbacks.move_modules import ConvertSyncBatchNorm, MoveModulesToDevice
from modelzoo_trainer.callbacks.nan_checker import NaNChecker
from modelzoo_trainer.callbacks.notification import EmailNotification, SlackNotification
from modelzoo_trainer.callbacks.op_profiler import OpProfiler
from modelzoo_trainer.callbacks.parts.csx_noops import DebugArgsPath, HFCacheDir, WeightCompression
from modelzoo_trainer.callbacks.parts.tensor_listeners import (
    NormTensorListener,
    SummaryTensorListener,
)
from modelzoo_trainer.callbacks.profiler import DurationProfiler, RateProfiler
from modelzoo_trainer.callbacks.profiler import Profiler as Profiler
from modelzoo_trainer.callbacks.progress import PrintProgress, ProgressBar
from modelzoo_trainer.callbacks.ray_train_report import RayTrainReport
from modelzoo_trainer.callbacks.report import Report
from modelzoo_trainer.callbacks.run_history import RunHistory
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
from modelzoo_trainer.zoo.callbacks.eleuther_eval_harness import EleutherEvalHarness
from modelzoo_trainer.zoo.callbacks.expert_load import LogExpertLoad
from modelzoo_trainer.zoo.callbacks.generate_text import GenerateText
from modelzoo_trainer.zoo.callbacks.hugging_face_checkpoint import HuggingFaceCheckpoint
from modelzoo_trainer.zoo.callbacks.lora import Lora

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


def default_callbacks() -> list[Callback]:
    """Return new instances of the callbacks that a YAML file gets by default."""
    return [
        CheckLoss(),
        LogOptimizerParamGroup("lr"),
        ComputeNorm(),
        ModelEvalMetrics(),
        RateProfiler(),
        DurationProfiler(),
        SavePerformanceData(),
        ModelZooParamsMetadata(),
    ]


if not TYPE_CHECKING:  # else a checker would accept any name

    def __getattr__(name: str) -> Any:
        missing = f"module {__name__!r} has no attribute {name!r}"
        if name in _FOREIGN:  # an AttributeError would lose the text in `from ... import`
            raise ImportError(f"{missing}. {_advice_for(_FOREIGN, name)}")
        raise AttributeError(missing)
