"""Tables of the older layout: the new place of each key.

A target is a path from `trainer.init`, its parts separated by "/" because flags contain dots. Below
"callbacks" and "loggers" comes the class, then its argument; without one, the value holds them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

Table = Mapping[str, str]

SECTIONS: Final = (
    "train_input",
    "eval_input",
    "model",
    "sparsity",
    "optimizer",
    "runconfig",
    "wandb",
)

_SAME_NAME: Final = {
    "": ("model_dir", "seed"),
    "backend": (
        "compile_dir",
        "compile_only",
        "validate_only",
        "enable_distributed",
        "main_process_id",
        "dist_backend",
        "init_method",
        "sync_batchnorm",
    ),
    "backend/cluster_config": (
        "num_csx",
        "num_workers_per_csx",
        "mgmt_address",
        "mgmt_namespace",
        "credentials_path",
        "mount_dirs",
        "python_paths",
        "job_labels",
        "job_priority",
        "job_time_sec",
        "disable_version_check",
    ),
    "precision": ("precision_opt_level",),
    "loop": (
        "num_steps",
        "max_steps",
        "num_epochs",
        "steps_per_epoch",
        "eval_frequency",
        "eval_steps",
    ),
    "checkpoint": (
        "autoload_last_checkpoint",
        "disable_strict_checkpoint_loading",
        "save_initial_checkpoint",
    ),
    "logging": ("log_steps", "wsc_log_level", "enable_act_frequency"),
    "callbacks/DebugArgsPath": ("debug_args_path",),
    "callbacks/LoadCheckpointStates": ("load_checkpoint_states",),
    "loggers/TensorBoardLogger": ("summary_dir", "legacy_event_dirs"),
}
_DEBUG_FLAGS: Final = (
    "ini",
    "debug_args",
    "retrace_every_iteration",
    "lazy_initialization",
    "log_initialization",
    "drop_data",
    "fabric_type_blacklist",
    "compile_crd_memory_gi",
    "execute_crd_memory_gi",
    "wrk_memory_gi",
    "act_memory_gi",
    "cmd_memory_gi",
    "wgt_memory_gi",
    "chf_memory_gi",
)

RUNCONFIG: Final[Table] = MappingProxyType(
    {
        key: f"{section}/{key}".lstrip("/")
        for section, section_keys in _SAME_NAME.items()
        for key in section_keys
    }
    | {key: f"callbacks/GlobalFlags/csx.debug.{key}" for key in _DEBUG_FLAGS}
    | {
        "target_device": "backend/backend_type",
        "num_wgt_servers": "backend/cluster_config/max_wgt_servers",
        "num_act_servers": "backend/cluster_config/max_act_per_csx",
        "checkpoint_steps": "checkpoint/steps",
        "logging": "logging/log_level",
        "transfer_processes": "callbacks/GlobalFlags/csx.performance.transfer_processes",
        "max_checkpoints": "callbacks/KeepNCheckpoints/n",
        "op_profiler_config": "callbacks/OpProfiler",
        "hf_cache_dir": "callbacks/HFCacheDir/cache_dir",
    }
)
"""Keys of `runconfig` that are moved unchanged."""

RUNCONFIG_SWITCHES: Final[Table] = MappingProxyType(
    {
        "check_loss_values": "CheckLoss",
        "log_input_summaries": "LogInputSummaries",
        "dump_activations": "DumpActivations",
    }
)
"""Keys of `runconfig` that are true or false and became a callback."""

RUNCONFIG_OTHERS: Final = ("checkpoint_path", "experimental", "mode")
"""Keys of `runconfig` that are converted in code."""

OPTIMIZER: Final[Table] = MappingProxyType(
    {
        key: f"precision/{key}"
        for key in (
            "loss_scaling_factor",
            "initial_loss_scale",
            "steps_per_increase",
            "min_loss_scale",
            "max_loss_scale",
            "max_gradient_norm",
            "max_gradient_value",
        )
    }
    | {"log_summaries": "precision/log_loss_scale", "grad_accum_steps": "loop/grad_accum_steps"}
)
"""Keys of `optimizer` that are no longer arguments of the optimizer."""

OPTIMIZER_OTHERS: Final = ("optimizer_type", "learning_rate")
"""Keys of `optimizer` that are converted in code."""

MODEL: Final[Table] = MappingProxyType(
    {
        "mixed_precision": "precision/enabled",
        "fp16_type": "precision/fp16_type",
        "lora_params": "callbacks/Lora/lora_params",
        "compression": "callbacks/WeightCompression/compressions",
        "selective_grad": "callbacks/SelectiveGrad/selective_grads",
    }
)
"""Keys of `model` that are no longer arguments of the model."""

_MICRO_BATCH: Final = "csx.performance.micro_batch_size"
INPUTS: Final[Mapping[str, Table]] = MappingProxyType(
    {
        "train_input": {"micro_batch_size": f"callbacks/ScopedTrainFlags/{_MICRO_BATCH}"},
        "eval_input": {"micro_batch_size": f"callbacks/ScopedValidateFlags/{_MICRO_BATCH}"},
    }
)
"""Keys of the inputs that are no longer arguments of the data processor."""

WANDB: Final[Table] = MappingProxyType(
    {
        key: f"loggers/WandbLogger/{key}"
        for key in (
            "project",
            "group",
            "run_id",
            "run_name",
            "job_type",
            "tags",
            "resume",
            "entity",
        )
    }
)
"""Keys of `wandb`."""

GONE: Final[Table] = MappingProxyType(
    {
        "runconfig.save_losses": "Remove it: the loss is always logged.",
        "runconfig.show_debug_metrics": "Remove it: there is no such output any more.",
        "runconfig.use_cs_grad_accum": "Remove it: optimizer.grad_accum_steps is enough.",
        "runconfig.dist_addr": "Remove it: the launcher of the processes, such as torchrun, "
        "sets it.",
        "runconfig.is_pretrained_checkpoint": "Write load_checkpoint_states: model and "
        "disable_strict_checkpoint_loading: true instead.",
        "optimizer.disable_lr_steps_reset": "Remove it: in a sequence each scheduler starts at its "
        "own step 0.",
    }
)
"""Keys of even older files, and what to do with them."""

CALLBACK_ORDER: Final = (
    "GlobalFlags",
    "ScopedTrainFlags",
    "ScopedValidateFlags",
    "DebugArgsPath",
    "Lora",
    "LogInputSummaries",
    "CheckLoss",
    "ComputeNorm",
    "LoadCheckpointStates",
    "KeepNCheckpoints",
    "LogSparsity",
    "WeightCompression",
    "SelectiveGrad",
    "OpProfiler",
    "DumpActivations",
    "HFCacheDir",
)
LOGGER_ORDER: Final = ("TensorBoardLogger", "WandbLogger")

DEFAULT_CALLBACKS: Final = frozenset({"CheckLoss", "ComputeNorm"})
"""Callbacks of switches that are installed by default."""
