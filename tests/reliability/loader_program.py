"""Chains of kills of a small training program, with the training data of `loader_kinds.py`.

PYTHONPATH=. python -m tests.reliability.loader_program FOLDER KIND [NUMBER ...]
"""

from __future__ import annotations

import importlib
import logging
import os
import random
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import KeepNCheckpoints
from modelzoo_trainer.optim.decay import LinearLR
from tests.reliability.digests import digest
from tests.reliability.loader_kinds import KINDS, library_of, steps_per_epoch
from tests.reliability.parts import Die, Events
from tests.reliability.toy_task import Net

EPOCHS: Final = 3
UNBROKEN: Final = "unbroken"
INEXACT: Final = "resumed run may differ"
MAX_STEPS: Final = 48


class ShiftedNet(Net):
    """Takes mappings too, and changes inputs by `shift`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(()), persistent=False)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        inputs, targets = batch.values() if isinstance(batch, dict) else batch
        return super().forward((inputs + self.shift, targets))


class Shift(Callback):
    """Changes inputs by what the generators of the training process give, and not the batch."""

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        drawn = random.random() + float(np.random.random()) + float(torch.rand(()))
        model.shift.fill_(0.05 * (drawn - 1.5))


class Log(Events):
    """Events, and among them warnings, the beginning of each step, and the result.

    `warning TEXT`, `step NUMBER`, `result WEIGHTS OPTIMIZER`, `error TEXT`, `ended CODE`.
    """

    def watch(self) -> None:
        """Write down the package's warnings from now on."""
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.tell(  # type: ignore[method-assign]
            "warning", " ".join(record.getMessage().encode("ascii", "replace").decode().split())
        )
        logging.getLogger("modelzoo_trainer").addHandler(handler)

    @override
    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.tell("step", trainer.global_step + 1)


def train(kind: str, folder: Path, told: Path, die_at: int | None) -> None:
    """Train to the end, or to the step at whose boundary the process kills itself."""
    torch.set_num_threads(1)
    events = Log(told)
    events.watch()
    with Trainer(
        progress="none",
        device="cpu",
        model_dir=folder,
        model=ShiftedNet,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
        schedulers=lambda optimizer: LinearLR(optimizer, 0.02, 0.0, MAX_STEPS),
        loop=TrainingLoop(
            num_epochs=EPOCHS, steps_per_epoch=steps_per_epoch(kind), eval_frequency=None
        ),
        checkpoint=Checkpoint(steps=1),
        callbacks=[events, Shift(), KeepNCheckpoints(2), Die(die_at, None)],
        seed=7,
    ) as trainer:
        trainer.fit(KINDS[kind]())
        weights, optimizer = trainer.model.state_dict(), trainer.optimizer.state_dict()
    events.tell("result", digest(weights), digest(optimizer))


def attempt(kind: str, folder: Path, told: Path, die_at: int | None) -> int:
    """Train in a process of its own; return its exit code, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        _train_and_exit(kind, folder, told, die_at)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with told.open("a", encoding="ascii") as file:
        file.write(f"ended {code}\n")
    return code


def _train_and_exit(kind: str, folder: Path, told: Path, die_at: int | None) -> NoReturn:
    code = 1
    try:
        train(kind, folder, told, die_at)
        code = 0
    except BaseException as error:  # noqa: BLE001  # nothing may return into the parent's frames
        traceback.print_exc()
        with told.open("a", encoding="ascii", errors="replace") as file:
            file.write(f"error {type(error).__name__}: {' '.join(str(error).split())}\n")
    sys.stderr.flush()
    os._exit(code)


def chains(kind: str, place: str, numbers: list[int]) -> int:
    """Train once to the end, then once for each number, killed at the steps of its schedule.

    What attempt k of chain n writes is in `PLACE/n/k.txt`, the unbroken run is in `unbroken/0.txt`.
    """
    if library := library_of(kind):
        importlib.import_module(library)  # once for all attempts
    root = Path(place)
    if num_steps := chain(kind, root / UNBROKEN, []):
        for number in numbers:
            chain(kind, root / str(number), schedule(kind, number, num_steps))
    return 0


def chain(kind: str, place: Path, kills: list[int]) -> int:
    """Train, killed at these steps; return the steps of the last attempt, 0 if one has failed."""
    place.mkdir(parents=True)
    num_steps = 0
    for number, die_at in enumerate([*kills, None]):
        told = place / f"{number}.txt"
        expected = 0 if die_at is None else -signal.SIGKILL
        has_failed = attempt(kind, place / "run", told, die_at) != expected
        num_steps = 0
        if has_failed:
            break
        lines = told.read_text(encoding="ascii").splitlines()
        num_steps = sum(line.startswith("step ") for line in lines)
    shutil.rmtree(place / "run", ignore_errors=True)
    return num_steps


def schedule(kind: str, number: int, num_steps: int) -> list[int]:
    """Return the steps at which a run of at least three is killed.

    Args:
        kind: Of the data.
        number: 0 = at the ends of epochs; 1 = twice at one step and soon after it; others: two to
            four random steps.
        num_steps: Of the run.
    """
    chance = random.Random(f"{kind} {number}")
    if number == 0:
        per_epoch = num_steps // EPOCHS
        return [per_epoch, 2 * per_epoch, num_steps]
    if number == 1:
        step = chance.randrange(1, num_steps - 1)
        return [step, step, step + 1]
    return sorted(chance.sample(range(1, num_steps), chance.randint(2, 4)))


if __name__ == "__main__":
    chains(sys.argv[2], sys.argv[1], [int(word) for word in sys.argv[3:]])
