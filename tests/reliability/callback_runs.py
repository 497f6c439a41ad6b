"""The training program with the shipped callbacks and loggers that have state, in groups."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from typing_extensions import override

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    Logger,
    Trainer,
    TrainingLoop,
    callbacks,
    checkpointing,
)
from modelzoo_trainer.core import Logging
from modelzoo_trainer.errors import CheckpointError
from modelzoo_trainer.loggers import CSVLogger, JsonlLogger, MLflowLogger, WandbLogger
from modelzoo_trainer.optim.warmup_stable_decay import WarmupStableDecay
from tests.callback_makers import MAKERS
from tests.reliability.digests import digest
from tests.reliability.forkserver import Child
from tests.reliability.parts import Die, Drop, Events, Jitter, Spoil
from tests.reliability.program import EVENTS, FINISHED, RESULT
from tests.reliability.runs import Run, Runs
from tests.reliability.toy_task import Net, Samples

TOLD: Final = "told.txt"
STORE: Final = "store"
BAD_STEP: Final = 14
_BATCH: Final = 4
_TIMINGS: Final = {"time", "flops_per_sec", "flops_utilization"}
# What differs between runs that are equal: times, and marks by which a run knows what it wrote.
_RANDOM: Final = {"mark", "run_id", "num_bytes", "tail", "last", "digest", "time"}
_ENVIRON: Final = {
    "mlflow": {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"},
    "wandb": {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"},
}


class Once(Callback):
    """Logs a metric in one step alone."""

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.global_step == 7:
            trainer.log_metrics(once=7.0)


class TellMetrics(callbacks.LogMetrics):
    """Tells metrics in a file that outlives the process."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    @override
    def log_metrics(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        line = json.dumps([trainer.global_step, metrics], sort_keys=True)
        os.write(self.descriptor, f"{line}\n".encode("ascii"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackPlan:
    """What is trained, and where it is killed.

    Args:
        folder: Of the run.
        beside: Where events and the result are written.
        group: Of `GROUPS`.
        steps: Of the whole run.
        accumulate: Batches a step.
        every: Steps between checkpoints.
        asynchronous: Write them while training goes on.
        die_at: Step at whose boundary the process kills itself, after its checkpoint.
        save_after_batch: Write a checkpoint after this many forwards and kill the process.
        drop: Entry of the checkpoint that is left out when it is loaded, "a/b/c".
    """

    folder: str
    beside: str
    group: str
    steps: int = 24
    accumulate: int = 1
    every: int = 1
    asynchronous: bool = False
    die_at: int | None = None
    save_after_batch: int | None = None
    drop: str | None = None

    @property
    def place(self) -> Path:
        return Path(self.beside)

    @property
    def bad_batch(self) -> tuple[int, int]:
        """Pass and number in it of the second batch of a step, or the only one."""
        return divmod((BAD_STEP - 1) * self.accumulate + min(self.accumulate - 1, 1), 24)


# ---- the groups: what does not exclude each other


def together(plan: CallbackPlan) -> list[Any]:
    return [
        callbacks.SkipSamples(3 * _BATCH),
        callbacks.SamplesStreamedInfo(),
        callbacks.SelectiveGrad({"param_filter": "h*.weight"}),
        callbacks.ModelEma(0.9, warmup=True),
        callbacks.CheckLoss("skip", spike_window=8),
        Spoil([plan.bad_batch]),
        Once(),
        callbacks.RunHistory(max_values=10),
        TellMetrics(plan.place / TOLD),
        callbacks.SaveBest("validate_0/loss", k=2),
        callbacks.ExtraCheckpoint(steps=3, keep=2),
        callbacks.ExtraCheckpoint(
            epochs=1, at_end=True, file_format="safetensors", averaged=True, folder="averages"
        ),
        callbacks.SaveCheckpointState(3),
        callbacks.WSDCheckpoint(),
        callbacks.KeepNCheckpoints(3),
        *(MAKERS[name]() for name in sorted(in_no_group())),
        JsonlLogger(),
        CSVLogger(),
    ]


def in_no_group() -> set[str]:
    """Return the callbacks with state that no group names."""
    named = {name for group in GROUPS.values() for name in group.__code__.co_names}
    named |= {cls.__name__ for cls in TellMetrics.__mro__}
    return {name for name in MAKERS if hasattr(getattr(callbacks, name), "state_dict")} - named


def going_back(plan: CallbackPlan) -> list[Any]:
    return [
        callbacks.CheckLoss("rollback", spike_window=8),
        Spoil([plan.bad_batch]),
        callbacks.ModelEma(0.9),
        callbacks.RunHistory(),
        JsonlLogger(),
        CSVLogger(),
    ]


def early(plan: CallbackPlan) -> list[Any]:
    stopping = callbacks.EarlyStopping("validate_0/loss", patience=2, min_delta=10.0)
    return [stopping, callbacks.ModelEma(0.9), JsonlLogger()]


def not_finite(plan: CallbackPlan) -> list[Any]:
    ends = [callbacks.TerminateOnNaN(), callbacks.CheckLoss()]
    return [*ends, callbacks.SamplesStreamedInfo(), Spoil([plan.bad_batch]), JsonlLogger()]


def spikes(plan: CallbackPlan) -> list[Any]:
    finds = [callbacks.SpikeDetection(window=4, rtol=20.0), callbacks.SamplesStreamedInfo()]
    return [*finds, callbacks.RunHistory(), Spoil([plan.bad_batch]), JsonlLogger()]


def flops(plan: CallbackPlan) -> list[Any]:
    return [callbacks.FlopUtilization(1e12), JsonlLogger()]


def mlflow(plan: CallbackPlan) -> list[Any]:
    return [MLflowLogger(tracking_uri=(plan.place / STORE).as_uri()), JsonlLogger()]


def wandb(plan: CallbackPlan) -> list[Any]:
    return [WandbLogger(project="p"), JsonlLogger()]


GROUPS: Final[Mapping[str, Callable[[CallbackPlan], list[Any]]]] = {
    group.__name__: group
    for group in (together, going_back, early, not_finite, spikes, flops, mlflow, wandb)
}


# ---- the program


def train(given: dict[str, Any]) -> int:
    """Train to the end, and write down what came of it."""
    torch.set_num_threads(1)
    plan = CallbackPlan(**given)
    os.environ |= _ENVIRON.get(plan.group, {})
    with trainer_of(plan) as trainer:
        trainer.fit(
            DataLoader(Samples(94, 1, augment=True), batch_size=_BATCH, shuffle=True),
            DataLoader(Samples(12, 2, augment=True), batch_size=_BATCH),
        )
    if plan.group == "wandb":
        end_wandb()
    text = json.dumps(result_of(trainer, plan), indent=1)
    (plan.place / RESULT).write_text(text, encoding="ascii")
    return FINISHED


def end_wandb() -> None:
    """Wait for the library's own process, as it does itself where a program ends in order."""
    import wandb

    wandb.teardown()


def trainer_of(plan: CallbackPlan) -> Trainer:
    group = GROUPS[plan.group](plan)
    drop = [] if plan.drop is None else [Drop(plan.drop)]
    others = [one for one in group if not isinstance(one, Logger)]
    return Trainer(
        progress="none",
        device="cpu",
        model_dir=plan.folder,
        model=lambda: Net(0.3),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
        schedulers=lambda optimizer: WarmupStableDecay(
            optimizer, 0.02, plan.steps, 3, decay_ratio=0.25, checkpoint_steps=[plan.steps // 2]
        ),
        loop=TrainingLoop(max_steps=plan.steps, grad_accum_steps=plan.accumulate, eval_frequency=5),
        checkpoint=Checkpoint(steps=plan.every, asynchronous=plan.asynchronous),
        logging=Logging(log_steps=1),
        callbacks=[
            Jitter(),
            Events(plan.place / EVENTS),
            *others,
            *drop,
            Die(plan.die_at, plan.save_after_batch),
        ],
        loggers=[one for one in group if isinstance(one, Logger)],
        seed=7,
    )


def result_of(trainer: Trainer, plan: CallbackPlan) -> dict[str, Any]:
    """Return what has to be equal, however often the run was interrupted."""
    result: dict[str, Any] = {
        "step": trainer.global_step,
        "reason": trainer.early_exit.reason,
        "weights": digest(trainer.model.state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict()),
        "schedulers": digest([scheduler.state_dict() for scheduler in trainer.schedulers]),
        "told": told(plan.place / TOLD),
    }
    for name, callback in trainer.stateful_callbacks():
        result[f"callbacks/{name}"] = digest(steady(callback.state_dict()))
    return result | written(Path(plan.folder))


def steady(value: Any) -> Any:
    """Return nested values without what differs between runs that are equal."""
    if isinstance(value, dict):
        return {name: steady(inner) for name, inner in value.items() if name not in _RANDOM}
    return [steady(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def told(path: Path) -> list[str]:
    """Return what `TellMetrics` has told; a run that is resumed tells some of it again."""
    return sorted(set(path.read_text(encoding="ascii").splitlines())) if path.exists() else []


def written(folder: Path) -> dict[str, str]:
    """Return a digest of each checkpoint and file in a folder of a run."""
    found: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.is_symlink():
            continue
        if path.is_dir() and not is_checkpoint(path):
            inner = {} if path.name in ("wandb", "logs") else written(path)
            found |= {f"{path.name}/{name}": value for name, value in inner.items()}
        else:
            found[path.name] = digest_of(path)
    return found


def is_checkpoint(path: Path) -> bool:
    try:
        checkpointing.read_manifest(path)
    except CheckpointError:
        return False
    return True


def digest_of(path: Path) -> str:
    """Return a digest of a checkpoint or a file, without times."""
    if path.is_dir():
        return digest(steady(checkpointing.load(path)))
    if path.suffix == ".safetensors":
        return digest(load_file(path))
    if path.suffix == ".jsonl":
        lines = path.read_text(encoding="utf-8").splitlines()
        return digest([timeless(json.loads(line)) for line in lines])
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            return digest([timeless(dict(row)) for row in csv.DictReader(file)])
    return digest(path.read_bytes())


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    """Return metrics without when they came, and how fast the run was."""
    return {name: value for name, value in record.items() if name not in _TIMINGS}


# ---- runs of it


class CallbackRun(Run):
    """A folder in which this program is run until it is done."""

    @override
    def start(self, **changes: Any) -> Child:
        plan = {"folder": str(self.folder), "beside": str(self.place)} | self.changes | changes
        return self.nursery.start("callback_runs:train", plan)

    @property
    def said(self) -> set[str]:
        """What was said of each batch: its number, the loss, a digest of the weights."""
        lines = (self.place / EVENTS).read_text(encoding="ascii").splitlines()
        return {line for line in lines if line.startswith("batch ")}


class CallbackRuns(Runs):
    """Makes runs of this program."""

    @override
    def new(self, **changes: Any) -> CallbackRun:
        self._num += 1
        return CallbackRun(self.nursery, self.folder / f"run-{self._num}", changes)
