"""A small real training program: it can be killed anywhere, resumed, and compared bit by bit.

PYTHONPATH=.:tests python tests/reliability/program.py FOLDER ['{"accumulate": 3, "workers": 2}']
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import CheckLoss, KeepNCheckpoints
from modelzoo_trainer.loggers import JsonlLogger
from modelzoo_trainer.optim.decay import LinearLR
from tests.reliability.digests import digest, metrics_digest
from tests.reliability.parts import (
    Die,
    Drop,
    Ema,
    EndAt,
    Events,
    FillDisk,
    Hold,
    Jitter,
    Slow,
    Spoil,
    TellBegin,
)
from tests.reliability.toy_task import PAUSE_S, Net, Samples

FINISHED: Final = 0
INTERRUPTED: Final = {"SIGINT": 130}  # what else interrupts a run ends it with 143
PREEMPTED: Final = 143
EVENTS: Final = "events.txt"
RESULT: Final = "result.json"
GO: Final = "go"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is trained, and where it goes wrong.

    Args:
        folder: Of the run.
        beside: Where `events.txt` and `result.json` are written; None = the folder's parent.
        root: Of the checkpoints; None = the folder.
        steps: Of the whole run.
        length: How the loop is told so: "max_steps" or "num_steps".
        samples: Of the training data, in batches of four.
        dropout: In the model.
        augment: Change each sample by numbers of python's, numpy's and torch's generators;
            without, the data is a `TensorDataset`, which is known to draw nothing.
        accumulate: Batches a step.
        workers: Processes that load.
        validate: Every five steps, with samples that draw as well.
        ema: Keep an average of the weights.
        asynchronous: Write checkpoints while training goes on.
        every: Steps between checkpoints; 0 = none.
        keep: How many checkpoints; None = all.
        policy: Of `CheckLoss`; None = none.
        bad_batches: Pass and number in it of batches whose loss is not finite.
        fault: What a loading worker does at a sample: "kill", "raise" or "hang".
        timeout_s: Of the loader.
        die_at: Step at whose boundary the process kills itself, after its checkpoint.
        end_in: Where, after its last step, the process ends itself: "validation" or "end".
        end_by: The number of the signal by which it does.
        save_after_batch: Write a checkpoint after this many forwards and kill the process.
        drop: Entry of the checkpoint that is left out when it is loaded, "a/b/c".
        slow: Where it sleeps, to be found there by a signal: "data", "step", "validation", "save".
        hold_at: Step at which it waits for the file `go` beside the result.
        full_from: Step from which on the disk is full.
        full_to: Step from which on it is not.
        pad: Numbers that the model holds besides, to make its checkpoints large.
        memory: Steps between snapshots in memory; 0 = none.
        memory_path: Their folder.
    """

    folder: str
    beside: str | None = None
    root: str | None = None
    steps: int = 48
    length: str = "max_steps"
    samples: int = 94
    dropout: bool = True
    augment: bool = True
    accumulate: int = 1
    workers: int = 0
    validate: bool = True
    ema: bool = True
    asynchronous: bool = False
    every: int = 1
    keep: int | None = None
    policy: str | None = None
    bad_batches: list[tuple[int, int]] = field(default_factory=list)
    fault: str | None = None
    timeout_s: float = 0
    die_at: int | None = None
    end_in: str | None = None
    end_by: int = signal.SIGKILL
    save_after_batch: int | None = None
    drop: str | None = None
    slow: str | None = None
    hold_at: int | None = None
    full_from: int | None = None
    full_to: int = 0
    pad: int = 0
    memory: int = 0
    memory_path: str | None = None

    @property
    def place(self) -> Path:
        """Where events and result are written."""
        return Path(self.folder).parent if self.beside is None else Path(self.beside)


def trainer_of(plan: Plan) -> Trainer:
    """Return the trainer of a plan."""
    events = Events(plan.place / EVENTS)
    callbacks: list[Any] = [Jitter(), events]
    callbacks += [TellBegin(events)] if plan.memory else []
    callbacks += [Ema()] if plan.ema else []
    callbacks += [] if plan.policy is None else [check_loss(plan.policy)]
    callbacks += [Spoil(plan.bad_batches)] if plan.bad_batches else []
    callbacks += [] if plan.keep is None else [KeepNCheckpoints(plan.keep)]
    callbacks += [] if plan.drop is None else [Drop(plan.drop)]
    callbacks += [] if plan.slow is None else [Slow(plan.slow)]
    callbacks += [] if plan.end_in is None else [EndAt(plan.end_in, plan.steps, plan.end_by)]
    callbacks += [] if plan.hold_at is None else [Hold(plan.hold_at, plan.place / GO)]
    if plan.full_from is not None:
        callbacks.append(FillDisk(plan.full_from, plan.full_to))
    later: dict[str, Any] = {"asynchronous": True} if plan.asynchronous else {}
    if plan.memory:
        later["memory"] = {"steps": plan.memory, "path": plan.memory_path}
    return Trainer(
        progress="none",
        device="cpu",
        model_dir=plan.folder,
        model=lambda: Net(0.3 if plan.dropout else 0.0, plan.pad),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
        schedulers=lambda optimizer: LinearLR(optimizer, 0.02, 0.0, plan.steps),
        loop=TrainingLoop(
            grad_accum_steps=plan.accumulate,
            eval_frequency=5 if plan.validate else None,
            **{plan.length: plan.steps},
        ),
        checkpoint=Checkpoint(steps=plan.every, checkpoint_root=plan.root, **later),
        callbacks=[*callbacks, Die(plan.die_at, plan.save_after_batch)],
        loggers=[JsonlLogger()],
        seed=7,
    )


def check_loss(policy: str) -> CheckLoss:
    return CheckLoss() if policy == "raise" else CheckLoss(policy=policy)


def loaders_of(plan: Plan) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
    """Return the loaders of training and of validation."""
    pause_s = PAUSE_S / 4 if plan.slow == "data" else 0
    train = Samples(plan.samples, 1, augment=plan.augment, fault=plan.fault, pause_s=pause_s)
    is_plain = not (plan.augment or plan.fault or pause_s)
    loader = DataLoader(
        TensorDataset(train.inputs, train.targets) if is_plain else train,
        batch_size=4,
        shuffle=True,
        num_workers=plan.workers,
        timeout=plan.timeout_s,
    )
    val = Samples(12, 2, augment=plan.augment)
    return loader, DataLoader(val, 4, num_workers=plan.workers) if plan.validate else None


def run(plan: Plan) -> int:
    """Train to the end, or until somebody stops it, and return the exit code."""
    torch.set_num_threads(1)
    with trainer_of(plan) as trainer:
        trainer.raise_on_interrupt = False
        trainer.fit(*loaders_of(plan))
        if trainer.interrupted is not None:
            return INTERRUPTED.get(trainer.interrupted, PREEMPTED)
    text = json.dumps(result_of(trainer, plan), indent=1)
    (plan.place / RESULT).write_text(text, encoding="ascii")
    return FINISHED


def result_of(trainer: Trainer, plan: Plan) -> dict[str, Any]:
    """Return what has to be equal, however often the run was interrupted."""
    ema = trainer.get_callback(Ema)
    return {
        "step": trainer.global_step,
        "weights": digest(trainer.model.state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict()),
        "schedulers": digest([scheduler.state_dict() for scheduler in trainer.schedulers]),
        "ema": None if ema is None else digest(ema.average),
        "metrics": metrics_digest(Path(plan.folder) / "metrics.jsonl"),
    }


def main() -> int:
    changes = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    plan = Plan(folder=sys.argv[1], **changes)
    code = run(plan)
    sys.stdout.write((plan.place / RESULT).read_text() if code == FINISHED else "stopped\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
