"""The add-on callbacks, one file each; the core ones are at hand here as well.

`__all__` is the registry: its classes are what a YAML file may name under `callbacks`.
"""

from modelzoo_trainer.callback import Callback as Callback
from modelzoo_trainer.callback import CoreCallback as CoreCallback
from modelzoo_trainer.callback import ValidationCallback as ValidationCallback
from modelzoo_trainer.callback import register_global_callback
from modelzoo_trainer.callbacks.check_loss import CheckLoss
from modelzoo_trainer.callbacks.compute_norm import ComputeNorm
from modelzoo_trainer.callbacks.count_params import CountParams
from modelzoo_trainer.callbacks.flags import GlobalFlags, ScopedTrainFlags, ScopedValidateFlags
from modelzoo_trainer.callbacks.generate_text import GenerateText
from modelzoo_trainer.callbacks.keep_n_checkpoints import KeepNCheckpoints
from modelzoo_trainer.callbacks.load_checkpoint_states import LoadCheckpointStates
from modelzoo_trainer.callbacks.log_optimizer_param_group import LogOptimizerParamGroup
from modelzoo_trainer.callbacks.model_eval_metrics import ModelEvalMetrics
from modelzoo_trainer.callbacks.rate_profiler import RateProfiler
from modelzoo_trainer.callbacks.save_best import SaveBest
from modelzoo_trainer.callbacks.save_checkpoint_state import SaveCheckpointState
from modelzoo_trainer.core import Checkpoint as Checkpoint
from modelzoo_trainer.core import Logging as Logging
from modelzoo_trainer.core import MixedPrecision as MixedPrecision
from modelzoo_trainer.core import TrainingLoop as TrainingLoop
from modelzoo_trainer.core import ValidationLoop as ValidationLoop

__all__ = [
    "CheckLoss",
    "ComputeNorm",
    "CountParams",
    "GenerateText",
    "GlobalFlags",
    "KeepNCheckpoints",
    "LoadCheckpointStates",
    "LogOptimizerParamGroup",
    "ModelEvalMetrics",
    "RateProfiler",
    "SaveBest",
    "SaveCheckpointState",
    "ScopedTrainFlags",
    "ScopedValidateFlags",
    "default_callbacks",
    "register_global_callback",
]


def default_callbacks() -> list[Callback]:
    """Return new instances of the callbacks that a YAML file gets without naming them."""
    return [
        CheckLoss(),
        LogOptimizerParamGroup("lr"),
        ComputeNorm(),
        ModelEvalMetrics(),
        RateProfiler(),
    ]
