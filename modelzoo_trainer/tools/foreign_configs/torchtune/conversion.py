"""Convert a training file of torchtune."""

from __future__ import annotations

import re
from math import inf
from typing import Any, Final

from modelzoo_trainer.tools.foreign_configs.duration import tidy
from modelzoo_trainer.tools.foreign_configs.exporting import export_callback
from modelzoo_trainer.tools.foreign_configs.findings import FindingKind, Findings
from modelzoo_trainer.tools.foreign_configs.section import Section, filled
from modelzoo_trainer.tools.foreign_configs.torchtune.data import convert_dataset
from modelzoo_trainer.tools.foreign_configs.torchtune.keys import KEYS
from modelzoo_trainer.tools.foreign_configs.torchtune.model import (
    convert_model,
    folder_of,
    has_adapters,
)

NAME: Final = "torchtune"
_RUN: Final = "./torchtune_run"
_REQUIRED: Final = ("model", "optimizer", "dataset", "checkpointer", "loss", "epochs")
_LOSSES: Final = re.compile(r"(CrossEntropyLoss|CEWithChunkedOutputLoss|LinearCrossEntropy\w*)$")
_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_ADAMW: Final = {
    "AdamW": "",
    "PagedAdamW": "",
    "AdamW8bit": "states have 8 bits there, the dtype of the weights here.",
    "PagedAdamW8bit": "states have 8 bits there, the dtype of the weights here.",
    "AdamW4bit": "states have 4 bits there, the dtype of the weights here.",
    "AdamWFp8": "states have 8 bits there, the dtype of the weights here.",
}
"""Optimizers that are AdamW, with what differs."""
_ADAMW_PATH: Final = "torch.optim.AdamW"
_KERNELS: Final = ("fused", "foreach", "_component_", "lr")


def is_torchtune(values: dict[str, Any]) -> bool:
    """Return whether a file is one of torchtune, by its keys."""
    sections = (values.get(key) for key in ("model", "tokenizer", "checkpointer", "optimizer"))
    return any(isinstance(one, dict) and "_component_" in one for one in sections)


def convert(
    values: dict[str, Any], named: set[str], findings: Findings, steps_per_epoch: int | None
) -> dict[str, Any]:
    """Return the arguments of `trainer` for the values of a file.

    Args:
        values: Without references.
        named: The paths that references name; such a key of its own is without effect.
        findings: Receives what is not converted, and mistakes.
        steps_per_epoch: For the schedule; None = unknown.
    """
    root = Section(values, "", "", KEYS, findings)
    for key in _REQUIRED:
        if values.get(key) is None:
            findings.mistake(
                f"{key}: is missing; a training file of {NAME} has it. Files of other recipes, "
                f"such as generation or evaluation, are not converted."
            )
    findings.raise_mistakes()
    trainer = _Conversion(root, named, findings, steps_per_epoch).run()
    findings.raise_mistakes()
    return trainer


class _Conversion:
    def __init__(
        self, root: Section, named: set[str], findings: Findings, steps_per_epoch: int | None
    ) -> None:
        self._root = root
        self._named = named
        self._findings = findings
        self._per_epoch = steps_per_epoch
        self._callbacks: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        root = self._root
        self._loss()
        init: dict[str, Any] = {"device": root.text("device", "auto"), "backend": self._backend()}
        init["model_dir"] = root.text("output_dir", _RUN)
        init["model"] = convert_model(root)
        init["optimizer"] = self._optimizer()
        init["schedulers"] = self._schedule()
        init["precision"] = self._clipping()
        init["loop"] = self._loop()
        init["checkpoint"] = self._checkpoint()
        init["logging"] = self._logging()
        self._profiler()
        init["callbacks"] = self._callbacks
        init["loggers"] = self._loggers()
        init["seed"] = root.integer("seed")
        fit = {"train_dataloader": self._train(), "val_dataloader": self._validation()}
        root.drop_named(self._named, KEYS)
        root.list_rest()
        trainer = {"init": filled(init), "fit": filled(fit)}
        if fit["val_dataloader"]:
            trainer["validate"] = {"val_dataloader": fit["val_dataloader"]}
        return trainer

    def _loss(self) -> None:
        section = self._root.inside("loss")
        name = str(section.text("_component_")).rpartition(".")[2]
        if not _LOSSES.search(name) and name != "DPOLoss":
            self._findings.mistake(
                f"loss._component_: {name!r} has no counterpart; cross entropy and DPOLoss have."
            )

    def _backend(self) -> dict[str, Any]:
        root = self._root
        strategy = str(root.text("fsdp_sharding_strategy", "FULL_SHARD"))
        shard = root.integer("data_parallel_shard_dim", -1)
        replicate = root.integer("data_parallel_replicate_dim", 1)
        parallel = {"replicate": replicate, "shard": shard} if replicate > 1 else {"shard": shard}
        backend: dict[str, Any] = {"parallel": parallel}
        if strategy == "NO_SHARD":
            backend["parallel"] = {"replicate": -1}
        reshards = root.flag("fsdp_reshard_after_forward", strategy != "SHARD_GRAD_OP")
        if reshards is False:
            backend["sharding"] = {"reshard_after_forward": False}
        if root.flag("enable_activation_checkpointing", False):
            backend["activation_checkpointing"] = "full"
        mode = root.text("ac_mode")
        if mode in ("full", "selective"):
            backend["activation_checkpointing"] = mode
        if self._compiles():
            backend["compile"] = True
        if root.flag("cudnn_deterministic_mode", False):
            backend["deterministic"] = True
        return backend

    def _compiles(self) -> bool:
        if isinstance(self._root.take("compile"), dict):
            return bool(self._root.inside("compile").flag("model", True))
        return bool(self._root.flag("compile", False))

    def _optimizer(self) -> dict[str, Any]:
        section = self._root.inside("optimizer")
        path = str(section.text("_component_", _ADAMW_PATH))
        if "_component_" not in section:
            self._root.findings.mistake(
                f"{section.where('_component_')}: missing. Give a class, such as {_ADAMW_PATH}."
            )
        name = path.rpartition(".")[2]
        lr = float(section.number("lr", 1e-3))
        if name not in _ADAMW:
            others = {key: value for key, value in section.rest().items() if key not in _KERNELS}
            if not path.startswith("torch.optim."):
                why = "the class must be installed, and take parameters or a model."
                section.differs("_component_", why)
            self._note_decay(section, others.get("weight_decay", 0.0))
            return {path: {"lr": lr, **others}}
        if _ADAMW[name]:
            section.differs("_component_", _ADAMW[name])
        decay = section.number("weight_decay", 0.01)
        self._note_decay(section, decay)
        arguments = {
            "lr": lr,
            "betas": section.betas("betas", [0.9, 0.999]),
            "eps": float(section.number("eps", 1e-8)),
            "eps_after_correction": True,
            "weight_decay": float(decay),
        }
        if section.flag("amsgrad", False):
            arguments["amsgrad"] = True
        for key in section.rest():
            if key in ("fused", "foreach"):
                section.note(FindingKind.NO_EFFECT, key, "a kernel; results are the same.")
            else:
                section.note(FindingKind.ABSENT, str(key), "AdamW has no such option.")
        return {"AdamW": arguments}

    def _note_decay(self, section: Section, decay: Any) -> None:
        if decay:
            why = (
                "biases and normalization layers have no weight decay here; in torchtune all "
                "parameters do."
            )
            section.differs("weight_decay", why)

    def _steps_of_epoch(self) -> int | None:
        limit = self._root.integer("max_steps_per_epoch")
        known = [number for number in (limit, self._per_epoch) if number]
        return min(known) if known else None

    def _schedule(self) -> list[dict[str, Any]]:
        root = self._root
        if "lr_scheduler" not in root:
            return []
        section = root.inside("lr_scheduler")
        name = str(section.text("_component_")).rpartition(".")[2]
        if name != "get_cosine_schedule_with_warmup":
            why = "it is unknown. The learning rate is constant: set schedulers."
            section.note(FindingKind.ABSENT, "_component_", why)
            return []
        warmup = section.integer("num_warmup_steps", 0)
        cycles = section.number("num_cycles", 0.5)
        if cycles not in (0, 0.5):
            why = "0.5 is used: from the learning rate to 0. Set schedulers."
            section.note(FindingKind.ABSENT, "num_cycles", why)
        return self._warmup_and(section, warmup, is_constant=cycles == 0)

    def _warmup_and(
        self, section: Section, warmup: int, *, is_constant: bool
    ) -> list[dict[str, Any]]:
        root = self._root
        lr = float(root.inside("optimizer").number("lr", 1e-3))
        rise = {"initial_learning_rate": 0.0, "end_learning_rate": lr, "total_iters": warmup}
        rest: dict[str, Any] = {"ConstantLR": {"learning_rate": lr}}
        if not is_constant:
            per_epoch = self._steps_of_epoch()
            if per_epoch is None:
                why = (
                    "the schedule ends with the run, whose number of steps is not in the file. "
                    "Convert again with --steps-per-epoch N (samples / (batch_size * "
                    "gradient_accumulation_steps * processes)). Until then the learning rate is "
                    "constant."
                )
                section.note(FindingKind.MISSING, "_component_", why)
                return []
            if self._per_epoch is None:
                why = "the schedule assumes that an epoch has that many steps."
                root.differs("max_steps_per_epoch", why)
            length = per_epoch * root.integer("epochs", 1) - warmup
            if length < 1:  # the run ends before the warm-up does
                return [{"LinearLR": rise}]
            decay = {"initial_learning_rate": lr, "end_learning_rate": 0.0, "total_iters": length}
            rest = {"CosineDecayLR": decay}
        if not warmup:
            return [rest]
        return [{"SequentialLR": {"schedulers": [{"LinearLR": rise}, rest]}}]

    def _clipping(self) -> dict[str, Any]:
        limit = self._root.take("clip_grad_norm")
        if limit in ("inf", inf):
            return {}
        limit = self._root.number("clip_grad_norm")
        return {} if limit is None else {"enabled": False, "max_gradient_norm": tidy(limit)}

    def _loop(self) -> dict[str, Any]:
        root = self._root
        loop: dict[str, Any] = {"num_epochs": root.integer("epochs", 1)}
        loop["steps_per_epoch"] = root.integer("max_steps_per_epoch")
        accumulated = root.integer("gradient_accumulation_steps", 1)
        loop["grad_accum_steps"] = accumulated if accumulated > 1 else None
        if "dataset_val" in root:
            every = root.integer("run_val_every_n_steps")
            if not every:
                why = "torchtune never uses it without run_val_every_n_steps; here each epoch does."
                root.differs("dataset_val", why)
            loop["eval_frequency"] = every or "epoch"
            loop["eval_steps"] = root.integer("max_val_batches")
        return filled(loop)

    def _checkpoint(self) -> dict[str, Any]:
        root = self._root
        checkpoint: dict[str, Any] = {}
        if root.flag("resume_from_checkpoint", False) is False:
            checkpoint["autoload_last_checkpoint"] = False
        every = root.integer("save_every_n_steps")
        if every:
            checkpoint["steps"] = every
        elif root.flag("save_last_epoch_only", False):
            checkpoint["save_final_checkpoint"] = True
        else:
            checkpoint["epochs"] = 1
        if root.flag("enable_async_checkpointing", False):
            checkpoint["asynchronous"] = True
        saver = root.inside("checkpointer")
        keep = root.integer("keep_last_n_checkpoints") or saver.integer("keep_last_n_checkpoints")
        if keep:
            self._callbacks.append({"KeepNCheckpoints": {"n": keep}})
        folder = saver.text("output_dir")
        if folder is not None:
            self._callbacks.append(self._export(saver, folder, every))
        return checkpoint

    def _export(self, saver: Section, folder: str, every: int | None) -> dict[str, Any]:
        """Return the callback that writes what the checkpointer does. `every`: in steps."""
        root = self._root
        only_last = root.flag("save_last_epoch_only", False) or root.integer("epochs", 1) == 1
        if not every and not only_last:
            every = self._steps_of_epoch()
            if every is None:
                why = (
                    "a folder is written after each epoch there, and at the end here, as the "
                    "number of steps of an epoch is not in the file. Convert again with "
                    "--steps-per-epoch N (samples / (batch_size * gradient_accumulation_steps * "
                    "processes))."
                )
                saver.note(FindingKind.MISSING, "output_dir", why)
        if every and any("keep_last_n_checkpoints" in section for section in (root, saver)):
            why = "checkpoints are deleted; all folders of HuggingFaceCheckpoint are kept."
            (root if "keep_last_n_checkpoints" in root else saver).differs(
                "keep_last_n_checkpoints", why
            )
        alone = has_adapters(root) and root.flag("save_adapter_weights_only", False)
        if has_adapters(root) and not alone:
            why = (
                "folders have the weights with the adapters merged; there also the adapters "
                "alone. For these, set merge_adapters: false."
            )
            saver.differs("output_dir", why)
        run = root.text("output_dir", _RUN)
        return export_callback(f"{folder}/hf_{{step}}", run, steps=every, adapters_alone=alone)

    def _logging(self) -> dict[str, Any]:
        root = self._root
        logging: dict[str, Any] = {"log_steps": root.integer("log_every_n_steps", 1)}
        level = str(root.text("log_level", "INFO")).upper()
        if level in _LEVELS and level != "INFO":
            logging["log_level"] = level
        return logging

    def _profiler(self) -> None:
        if "profiler" not in self._root:
            return
        section = self._root.inside("profiler")
        section.text("_component_")
        if not section.flag("enabled", False):
            section.rest()
            section.note(FindingKind.NO_EFFECT, "enabled", "nothing is profiled.")
            return
        start = section.integer("wait_steps", 5) + section.integer("warmup_steps", 5) + 1
        end = start + section.integer("active_steps", 2) - 1
        if section.integer("num_cycles", 1) not in (0, 1):
            section.differs("num_cycles", "the first cycle is profiled only.")
        self._callbacks.append({"OpProfiler": {"start_step": start, "end_step": end}})

    def _loggers(self) -> list[dict[str, Any]]:
        if "metric_logger" not in self._root:
            return []
        section = self._root.inside("metric_logger")
        name = str(section.text("_component_")).rpartition(".")[2]
        names = _LOGGERS.get(name.lower())
        if names is None:
            section.take("log_dir")
            if name not in ("DiskLogger", "StdoutLogger"):
                why = "there is no such logger: see docs/loggers.md."
                section.note(FindingKind.ABSENT, "_component_", why)
            return []
        kind, keys = names
        given = {ours: section.take(theirs) for theirs, ours in keys.items()}
        if "log_dir" not in keys:
            section.take("log_dir")
        return [{kind: filled(given)}]

    def _train(self) -> dict[str, Any]:
        root = self._root
        loader = convert_dataset(root, "dataset", folder_of(root))
        loader["batch_size"] = root.integer("batch_size", 1)
        loader["shuffle"] = root.flag("shuffle", True)
        loader |= self._workers()
        seed = root.integer("seed")
        return loader | ({"shuffle_seed": seed} if seed is not None else {})

    def _validation(self) -> dict[str, Any] | None:
        root = self._root
        if "dataset_val" not in root:
            return None
        loader = convert_dataset(root, "dataset_val", folder_of(root))
        loader["batch_size"] = root.integer("batch_size_val") or root.integer("batch_size", 1)
        return loader | {"shuffle": False, "drop_last": False} | self._workers()

    def _workers(self) -> dict[str, Any]:
        number = self._root.integer("num_workers")
        return {} if number is None else {"num_workers": number}


_LOGGERS: Final = {
    "wandblogger": (
        "WandbLogger",
        {"project": "project", "entity": "entity", "group": "group", "name": "run_name"}
        | {"tags": "tags"},
    ),
    "tensorboardlogger": ("TensorBoardLogger", {"log_dir": "summary_dir"}),
    "mlflowlogger": (
        "MLflowLogger",
        {"experiment_name": "experiment_name", "tracking_uri": "tracking_uri"}
        | {"run_id": "run_id", "run_name": "run_name", "tags": "tags"},
    ),
}
