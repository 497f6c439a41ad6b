"""Loggers and callbacks of llm-foundry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from modelzoo_trainer.base.dtypes import dtype_name
from modelzoo_trainer.tools.foreign_configs.duration import RunLengths, read_duration
from modelzoo_trainer.tools.foreign_configs.exporting import (
    export_callback,
    folder_name,
    has_field,
    why_not_exported,
)
from modelzoo_trainer.tools.foreign_configs.findings import FindingKind
from modelzoo_trainer.tools.foreign_configs.llm_foundry.data import Data
from modelzoo_trainer.tools.foreign_configs.section import Section

Component = dict[str, Any]  # {ClassName: arguments}
_LOGGERS: Final = {
    "wandb": (
        "WandbLogger",
        {"project": "project", "group": "group", "name": "run_name"}
        | {"entity": "entity", "tags": "tags"},
    ),
    "mlflow": (
        "MLflowLogger",
        {"experiment_name": "experiment_name", "run_name": "run_name"}
        | {"tracking_uri": "tracking_uri", "tags": "tags"},
    ),
    "tensorboard": ("TensorBoardLogger", {"log_dir": "summary_dir"}),
}


def convert_loggers(root: Section) -> list[Component]:
    """Return the section `loggers`."""
    if "loggers" not in root:
        return []
    section, found = root.inside("loggers"), []
    for name, (kind, names) in _LOGGERS.items():
        if name in section:
            options = section.inside(name)
            given = {ours: options.take(theirs) for theirs, ours in names.items()}
            found.append({kind: {key: value for key, value in given.items() if value is not None}})
    return found


def convert_callbacks(root: Section, run: RunLengths, data: Data) -> list[Component]:
    """Return the section `callbacks`."""
    found: list[Component] = []
    loggers = root.inside("loggers") if "loggers" in root else None
    if loggers is not None and {"inmemory", "in_memory_logger"} & set(loggers):
        for name in ("inmemory", "in_memory_logger"):
            loggers.take(name)
        found.append({"RunHistory": {}})
    if "callbacks" not in root:
        return found
    section = root.inside("callbacks")
    for name in section:
        convert = _CALLBACKS.get(name)
        if convert is not None:
            options = section.inside(name)
            found += convert(options, run, data)
    return found


def convert_export(
    root: Section, run: RunLengths, data: Data, model: dict[str, Any], model_dir: str
) -> list[Component]:
    """Return the callback that writes folders of Hugging Face.

    `model` and `model_dir`: of the converted file.
    """
    if "callbacks" not in root or "hf_checkpointer" not in root.inside("callbacks"):
        return []
    section = root.inside("callbacks").inside("hf_checkpointer")
    is_theirs = model.get("name") == "hf_causal_lm"
    if model and not is_theirs:
        refusal = why_not_exported(model)
        if refusal is not None:
            section.rest()
            root.inside("callbacks").left_out("hf_checkpointer", refusal)
            return []
        section.differs("save_folder", "the architecture in config.json is not MPT.")
    changed = next((key for key in ("config_overrides", "pretrained") if key in model), None)
    if "peft_config" in model and changed:
        why = (
            f"adapters are merged into the weights, as {changed} makes another model of the folder."
        )
        section.differs("save_folder", why)
    dtype = dtype_name(section.text("precision", "float32"))
    if dtype not in ("float32", "float16", "bfloat16"):
        section.findings.mistake(
            f"{section.where('precision')}: {dtype!r} is unknown; it is float32, float16 or "
            f"bfloat16."
        )
    return [
        export_callback(
            _export_folder(section, data.run_name, model_dir),
            model_dir,
            steps=_export_steps(section, run),
            dtype=dtype,
            tokenizer=data.tokenizer_besides(model.get("pretrained_model_name_or_path")),
            adapters_alone="peft_config" in model and not changed,
        )
    ]


def _export_folder(section: Section, run_name: str, model_dir: str) -> str:
    """Return the path of the folders, with the field `{step}`."""
    given = section.text("huggingface_folder_name", "ba{batch}").replace("{run_name}", run_name)
    name = folder_name(given)
    if name is None:
        name = "ba{step}"
        section.differs("huggingface_folder_name", f"folders are named {name}.")
    folder = section.text("save_folder")
    if folder is None:
        section.findings.mistake(f"{section.where('save_folder')}: is missing; a folder.")
        return model_dir
    folder = folder.replace("{run_name}", run_name)
    if "://" in folder or has_field(folder):
        section.differs("save_folder", "folders are written to model_dir; copy them there.")
        folder = model_dir
    return f"{folder}/huggingface/{name}"


def _export_steps(section: Section, run: RunLengths) -> int | None:
    """Return the number of steps between folders; None = at the end only."""
    given = section.take("save_interval")
    time = None if given is None else read_duration(given)
    if time is None:
        what = "is missing;" if given is None else f"{given!r} is not"
        section.findings.mistake(
            f"{section.where('save_interval')}: {what} a length of time, such as 1ep, 100ba or "
            f"1dur."
        )
        return None
    if (time.value, time.unit) == (1.0, "dur") or time == run.length:
        return None
    steps = run.steps(time)
    if steps is None:
        section.note(FindingKind.MISSING, "save_interval", run.why_unknown(time))
    return steps or None


def convert_profiler(root: Section) -> list[Component]:
    """Return the callback of the section `profiler`."""
    if "profiler" not in root:
        return []
    schedule = root.inside("profiler").inside("schedule")
    ready = sum(schedule.integer(key, 0) for key in ("skip_first", "wait"))
    start = ready + schedule.integer("warmup", 1) + 1
    end = start + schedule.integer("active", 4) - 1
    if schedule.integer("repeat", 1) != 1:
        schedule.differs("repeat", "the first cycle is profiled only.")
    return [{"OpProfiler": {"start_step": start, "end_step": end}}]


def _learning_rate(section: Section, run: RunLengths, data: Data) -> list[Component]:
    return [{"LogOptimizerParamGroup": {"keys": "lr"}}]


def _speed(section: Section, run: RunLengths, data: Data) -> list[Component]:
    peak = section.number("gpu_flops_available")
    return [{"RateProfiler": {}}, {"FlopUtilization": {"peak_flops": float(peak)} if peak else {}}]


def _remaining(section: Section, run: RunLengths, data: Data) -> list[Component]:
    return [{"DurationProfiler": {}}]


def _norms(section: Section, run: RunLengths, data: Data) -> list[Component]:
    return [{"ComputeNorm": {}}]


def _nan(section: Section, run: RunLengths, data: Data) -> list[Component]:
    return [{"CheckLoss": {}}]


def _early_stopping(section: Section, run: RunLengths, data: Data) -> list[Component]:
    label = section.text("dataloader_label")
    monitor = section.text("monitor") or ""
    if label == "train":
        metric = "loss"
    else:
        number = data.labels.index(label) if label in data.labels else 0
        metric = f"validate_{number}/loss"
    mode = "max" if "greater" in str(section.take("comp", "")) else "min"
    if "accuracy" in monitor.lower():
        metric, mode = metric.replace("loss", "accuracy"), "max"
    elif monitor not in ("LanguageCrossEntropy", "loss", "loss/train/total"):
        section.differs("monitor", f"the converted file has {metric}. Set another metric.")
    patience = read_duration(section.take("patience", "1ep"))
    if patience is None or patience.unit != "ep" or not patience.value.is_integer():
        section.differs("patience", "patience counts validations here.")
    arguments: dict[str, Any] = {"metric": metric, "mode": mode}
    arguments["patience"] = max(1, int(patience.value)) if patience is not None else 1
    arguments["min_delta"] = float(section.number("min_delta", 0.0))
    return [{"EarlyStopping": arguments}]


def _generate(section: Section, run: RunLengths, data: Data) -> list[Component]:
    shared: dict[str, Any] = {}
    for key in ("max_new_tokens", "temperature", "top_k"):
        value = section.number(key)
        if value is not None:
            shared[key] = value
    if section.flag("do_sample", True) is False:
        shared["temperature"] = 0.0
    prompts = section.take("prompts", [])
    if "interval" in section:
        section.left_out("interval", "text is generated at the end of a fit.")
    prompts = prompts if isinstance(prompts, list) else [prompts]
    if len(prompts) > 1:
        section.differs("prompts", "text is generated for the first prompt only.")
    return [{"GenerateText": {"prompt": str(prompt), **shared}} for prompt in prompts[:1]]


_CALLBACKS: Final[dict[str, Callable[[Section, RunLengths, Data], list[Component]]]] = {
    "lr_monitor": _learning_rate,
    "speed_monitor": _speed,
    "runtime_estimator": _remaining,
    "optimizer_monitor": _norms,
    "nan_monitor": _nan,
    "early_stopper": _early_stopping,
    "generate_callback": _generate,
}
