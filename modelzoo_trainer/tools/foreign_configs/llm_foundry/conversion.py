"""Convert a training file of llm-foundry."""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.base.dtypes import dtype_name
from modelzoo_trainer.tools.foreign_configs.duration import Duration, RunLengths, read_duration
from modelzoo_trainer.tools.foreign_configs.findings import FindingKind, Findings
from modelzoo_trainer.tools.foreign_configs.llm_foundry.data import Data
from modelzoo_trainer.tools.foreign_configs.llm_foundry.keys import COMMON
from modelzoo_trainer.tools.foreign_configs.llm_foundry.model import convert_model
from modelzoo_trainer.tools.foreign_configs.llm_foundry.model_keys import MODEL
from modelzoo_trainer.tools.foreign_configs.llm_foundry.monitoring import (
    convert_callbacks,
    convert_export,
    convert_loggers,
    convert_profiler,
)
from modelzoo_trainer.tools.foreign_configs.llm_foundry.optimization import (
    convert_clipping,
    convert_optimizer,
    convert_scheduler,
)
from modelzoo_trainer.tools.foreign_configs.section import Section, filled

NAME: Final = "llm-foundry"
_REQUIRED: Final = ("model", "optimizer", "train_loader", "max_duration")
_PRECISIONS: Final = {"amp_bf16": "bfloat16", "amp_fp16": "float16"}
_DTYPES: Final = ("bfloat16", "float16", "float32")
_STRATEGIES: Final = {
    "FULL_SHARD": {"shard": -1},
    "SHARD_GRAD_OP": {"shard": -1},
    "NO_SHARD": {"replicate": -1},
}
_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def is_llm_foundry(values: dict[str, Any]) -> bool:
    """Return whether a file is one of llm-foundry, by its keys."""
    return "train_loader" in values and isinstance(values.get("model"), dict)


def convert(
    values: dict[str, Any], named: set[str], findings: Findings, steps_per_epoch: int | None
) -> dict[str, Any]:
    """Return the arguments of `trainer` for the values of a file.

    Args:
        values: Without references.
        named: The paths that references name; such a key of its own is without effect.
        findings: Receives what is not converted, and mistakes.
        steps_per_epoch: For lengths in epochs; None = unknown.
    """
    root = Section(values, "", "", {**COMMON, **MODEL}, findings)
    for key in _REQUIRED:
        if values.get(key) is None:
            findings.mistake(f"{key}: is missing; a training file of {NAME} has it.")
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
        self._data = Data(root, findings)
        length = self._time("max_duration") or Duration(1.0, "ep")
        subset = root.integer("train_subset_num_batches", -1)
        per_epoch = subset if subset > 0 else steps_per_epoch
        self._run = RunLengths(
            length, self._data.samples_per_step, per_epoch, self._data.tokens_per_sample
        )
        self._callbacks: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        root = self._root
        init: dict[str, Any] = {"device": "auto"}
        init["backend"] = self._backend()
        init["model_dir"] = f"./{self._data.run_name}"
        init["model"] = convert_model(root, init["backend"])
        init["optimizer"] = convert_optimizer(root)
        init["schedulers"] = convert_scheduler(root, self._run)
        init["precision"] = self._precision()
        init["loop"] = self._loop()
        init["checkpoint"] = self._checkpoint()
        init["logging"] = self._logging()
        self._micro_batches()
        self._callbacks += convert_callbacks(root, self._run, self._data)
        self._callbacks += convert_export(
            root, self._run, self._data, init["model"], init["model_dir"]
        )
        self._callbacks += convert_profiler(root)
        init["callbacks"] = self._callbacks
        init["loggers"] = convert_loggers(root)
        init["progress"] = self._progress()
        init["seed"] = root.integer("seed")
        root.drop_named(self._named, COMMON)
        root.list_rest()
        validation = self._data.validation
        fit = {"train_dataloader": self._data.train, "val_dataloader": validation}
        trainer = {"init": filled(init), "fit": filled(fit)}
        if isinstance(validation, dict):
            trainer["validate"] = {"val_dataloader": validation}
        elif validation:
            trainer["validate_all"] = {"val_dataloaders": validation}
        return trainer

    def _time(self, key: str, default: Any = None) -> Duration | None:
        """Return the length at a key; None if it is null, or (with a mistake) invalid."""
        value = self._root.take(key, default)
        time = None if value is None else read_duration(value)
        if value is not None and time is None:
            self._findings.mistake(
                f"{key}: {value!r} is not a length of time, such as 2ep, 100ba or 1000000tok."
            )
        return time

    def _backend(self) -> dict[str, Any]:
        root = self._root
        backend: dict[str, Any] = {}
        if "fsdp_config" in root:
            self._sharding(root.inside("fsdp_config"), backend)
        timeout = root.number("dist_timeout")
        if timeout is not None:
            backend["timeout"] = float(timeout)
        if "compile_config" in root:
            compiling = root.inside("compile_config")
            keys = ("mode", "fullgraph", "dynamic", "backend")
            options = {key: compiling.take(key) for key in keys if key in compiling}
            if not compiling.flag("disable", False):
                backend["compile"] = options or True
        return backend

    def _sharding(self, fsdp: Section, backend: dict[str, Any]) -> None:
        strategy = str(fsdp.text("sharding_strategy", "FULL_SHARD")).upper()
        parallel = self._mesh(fsdp, strategy)
        backend["parallel"] = parallel
        sharding: dict[str, Any] = {}
        if strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
            sharding["reshard_after_forward"] = False
        sharding |= self._sharding_types(fsdp)
        if sharding and "shard" in parallel:
            backend["sharding"] = sharding
        if fsdp.flag("activation_checkpointing", False):
            backend["activation_checkpointing"] = "full"

    def _mesh(self, fsdp: Section, strategy: str) -> dict[str, int]:
        """Return the numbers of processes along each axis."""
        shard = fsdp.integer("data_parallel_shard_degree")
        replicate = fsdp.integer("data_parallel_replicate_degree")
        if replicate:
            return {"replicate": replicate, "shard": shard or -1}
        if strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
            if not shard:
                fsdp.differs("sharding_strategy", "shard: 8 assumes nodes with eight devices.")
            return {"replicate": -1, "shard": shard or 8}
        if strategy not in _STRATEGIES:
            self._findings.mistake(
                f"{fsdp.where('sharding_strategy')}: {strategy!r} is unknown; it is one of "
                f"{', '.join(_STRATEGIES)}, HYBRID_SHARD."
            )
        mesh = dict(_STRATEGIES.get(strategy, {}))
        return {"shard": shard} if shard and "shard" in mesh else mesh

    def _sharding_types(self, fsdp: Section) -> dict[str, Any]:
        """Return the dtypes of parameters and gradients while they are communicated."""
        given = fsdp.take("mixed_precision", "DEFAULT")
        half = _PRECISIONS.get(str(self._root.take("precision", "amp_bf16")))
        if isinstance(given, dict):
            kinds = {key: _dtype(given.get(key)) for key in ("param_dtype", "reduce_dtype")}
            if given.get("buffer_dtype"):
                fsdp.differs("mixed_precision", "buffers keep their dtype.")
            return {key: value for key, value in kinds.items() if value}
        level = str(given).upper()
        if half is None or level == "FULL":
            return {}
        if level not in ("DEFAULT", "PURE"):
            self._findings.mistake(
                f"{fsdp.where('mixed_precision')}: {given!r} is unknown; it is FULL, DEFAULT, "
                f"PURE or a mapping."
            )
        return {"param_dtype": half, "reduce_dtype": half if level == "PURE" else "float32"}

    def _precision(self) -> dict[str, Any]:
        root = self._root
        name = str(root.take("precision", "amp_bf16"))
        clipping = convert_clipping(root)
        half = _PRECISIONS.get(name)
        if name == "amp_fp8":
            half = "bfloat16"
            root.differs("precision", "there are no 8-bit products here; bfloat16 is used.")
        elif half is None and name != "fp32":
            self._findings.mistake(
                f"precision: {name!r} is unknown; it is fp32, amp_bf16, amp_fp16 or amp_fp8."
            )
        if half is None:
            return {"enabled": False, **clipping} if clipping else {}
        scaling = {"loss_scaling_factor": "dynamic"} if half == "float16" else {}
        return {"fp16_type": half, **scaling, **clipping}

    def _loop(self) -> dict[str, Any]:
        root, run = self._root, self._run
        length = run.length
        loop: dict[str, Any] = {}
        if length.unit == "ep" and length.value.is_integer():
            loop["num_epochs"] = int(length.value)
        elif length.unit == "sec":
            loop |= {"max_time": length.value, "num_epochs": 10**9}
        elif run.total is not None:
            loop["max_steps"] = run.total
        else:
            root.note(FindingKind.MISSING, "max_duration", run.why_unknown(length))
        frequency = self._eval_frequency()
        if self._data.validation is not None:
            loop["eval_frequency"] = frequency
        loop |= self._number_of("eval_subset_num_batches", "eval_steps")
        loop |= self._number_of("train_subset_num_batches", "steps_per_epoch")
        return loop

    def _number_of(self, key: str, ours: str) -> dict[str, Any]:
        number = self._root.integer(key, -1)
        return {ours: number} if number != -1 else {}

    def _eval_frequency(self) -> Any:
        time = self._time("eval_interval", 1)
        if time is None or not time.value:
            return None
        if time.unit == "dur":
            return time.value
        if (time.value, time.unit) == (1.0, "ep"):
            return "epoch"
        steps = self._run.steps(time)
        if steps is None and self._data.validation is not None:
            self._root.note(FindingKind.MISSING, "eval_interval", self._run.why_unknown(time))
            return "epoch" if time.unit == "ep" else None
        return steps

    def _checkpoint(self) -> dict[str, Any]:
        root = self._root
        resumes = root.flag("autoresume")
        checkpoint: dict[str, Any] = {}
        if resumes is False:
            checkpoint["autoload_last_checkpoint"] = False
        if "save_folder" not in root:
            return checkpoint
        folder = str(root.text("save_folder"))
        if "://" in folder:
            root.differs("save_folder", "checkpoints are written to model_dir; copy them there.")
        else:
            checkpoint["checkpoint_root"] = folder.replace("{run_name}", self._data.run_name)
        checkpoint |= self._save_interval()
        keep = root.integer("save_num_checkpoints_to_keep", -1)
        if keep > 0:
            self._callbacks.append({"KeepNCheckpoints": {"n": keep}})
        elif keep == 0:
            why = "none would be left; all are kept. Add KeepNCheckpoints."
            root.differs("save_num_checkpoints_to_keep", why)
        return checkpoint

    def _save_interval(self) -> dict[str, Any]:
        time = self._time("save_interval", "1000ba")
        if time is None:
            return {}
        if time.unit == "ep" and time.value.is_integer():
            return {"epochs": int(time.value)}
        if (time.value, time.unit) == (1.0, "dur"):
            return {"save_final_checkpoint": True}
        if time.unit == "sec":
            return {"minutes": time.value / 60}
        steps = self._run.steps(time)
        if steps is None:
            self._root.note(FindingKind.MISSING, "save_interval", self._run.why_unknown(time))
            return {"save_final_checkpoint": True}
        return {"steps": steps}

    def _logging(self) -> dict[str, Any]:
        logging: dict[str, Any] = {}
        time = self._time("console_log_interval", "1ba")
        steps = None if time is None else self._run.steps(time)
        if time is not None and steps is None:
            self._root.note(
                FindingKind.MISSING, "console_log_interval", self._run.why_unknown(time)
            )
        logging["log_steps"] = steps or 1
        level = self._root.text("python_log_level")
        if level and level.upper() in _LEVELS:
            logging["log_level"] = level.upper()
        return logging

    def _progress(self) -> str:
        bar, lines = self._root.flag("progress_bar", False), self._root.flag("log_to_console", True)
        return "bar" if bar else "lines" if lines else "none"

    def _micro_batches(self) -> None:
        root = self._root
        size = root.take("device_train_microbatch_size", "auto")
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            flags = {"csx.performance.micro_batch_size": size}
            self._callbacks.append({"ScopedTrainFlags": flags})
        else:
            why = (
                "batches are not split. If memory is short, set micro_batch_size in "
                "ScopedTrainFlags to the number of samples that fits."
            )
            self._findings.add(
                FindingKind.DIFFERENT,
                "device_train_microbatch_size",
                size if "device_train_microbatch_size" in root else ...,
                why,
            )


def _dtype(value: Any) -> str | None:
    name = dtype_name(_PRECISIONS.get(value, value) if isinstance(value, str) else value)
    return name if name in _DTYPES else None
