"""The callbacks of the training program: what it keeps, what it tells, and what breaks it."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelzoo_trainer import Callback
from modelzoo_trainer.checkpointing import disk
from tests.reliability.digests import digest
from tests.reliability.toy_task import PAUSE_S


class Ema(Callback):
    """An average of the weights."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def on_after_optimizer_step(self, trainer, model, optimizer):
        for name, value in model.named_parameters():
            value = value.detach()
            known = self.average.get(name)
            self.average[name] = value.clone() if known is None else known.lerp(value, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = {name: value.clone() for name, value in state["average"].items()}


class Jitter(Callback):
    """Changes batches by what the generators of the training process give."""

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        shift = random.random() + float(np.random.random()) + float(torch.rand(()))
        batch[0].add_(0.05 * (shift - 1.5))


class Spoil(Callback):
    """Makes the loss of some batches infinite."""

    def __init__(self, batches: list[tuple[int, int]]) -> None:
        self.batches = set(map(tuple, batches))

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        is_bad = (trainer.data.epoch, batch_idx) in self.batches
        model.spoil.fill_(float("inf") if is_bad else 0.0)

    def on_rollback(self, trainer, ckpt_path):
        trainer.model.spoil.fill_(0.0)  # a validation may come before the next batch


class Drop(Callback):
    """Leaves an entry of a checkpoint out when it is loaded."""

    def __init__(self, path: str) -> None:
        self.parts = path.split("/")

    def preprocess_checkpoint(self, trainer, state_dict):
        inner = state_dict
        for part in self.parts[:-1]:
            inner = inner[part]
        del inner[self.parts[-1]]


class Events(Callback):
    """Tells what happens, a line each, in a file that outlives the process.

    `start STEP`, `batch NUMBER LOSS DIGEST`, `saved STEP NAME`, `validated STEP`, `stopped STEP`.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self.descriptor = os.open(path, flags, 0o666)

    def tell(self, *words: object) -> None:
        os.write(self.descriptor, (" ".join(map(str, words)) + "\n").encode("ascii"))

    def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
        self.tell("start", trainer.global_step)

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        loss = outputs["loss"].item()
        number = trainer.data.num_batches
        self.tell("batch", number, loss.hex(), digest(model.state_dict())[:16])

    def on_after_save_checkpoint(self, trainer, ckpt_path):
        self.tell("saved", trainer.global_step, ckpt_path.name)

    def on_validate_end(self, trainer, model, loop):
        self.tell("validated", trainer.global_step)

    def on_fit_end(self, trainer, loop):
        self.tell("stopped", trainer.global_step)


class TellBegin(Callback):
    """Tells `begin STEP` before the snapshot that a fit starts from counts as used.

    Args:
        events: Where it is told.
    """

    def __init__(self, events: Events) -> None:
        self.events = events

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        self.events.tell("begin", trainer.global_step)


class Die(Callback):
    """Kills the process, as the operating system does: at a step, or after saving within one."""

    def __init__(self, at_step: int | None, after_batch: int | None) -> None:
        self.at_step = at_step
        self.after_batch = after_batch

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.data.num_batches == self.after_batch:
            trainer.save_checkpoint()
            os.kill(os.getpid(), signal.SIGKILL)

    # Behind the boundary, where a checkpoint may be written: the next batch, or the stage's end.

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.die_at(trainer.global_step)

    def on_train_end(self, trainer, model, loop, loop_idx):
        self.die_at(trainer.global_step)

    def die_at(self, step: int) -> None:
        if step == self.at_step:
            os.kill(os.getpid(), signal.SIGKILL)


class EndAt(Callback):
    """Sends the process a signal between the last step of a run and its end.

    Args:
        place: "validation" = after the first batch of the last one; "end" = when all is done.
        last_step: Of the run.
        number: The signal.
    """

    def __init__(self, place: str, last_step: int, number: int) -> None:
        self.place = place
        self.last_step = last_step
        self.number = number

    def on_validate_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.end_at("validation", trainer.global_step)

    def on_fit_end(self, trainer, loop):
        self.end_at("end", trainer.global_step)

    def end_at(self, place: str, step: int) -> None:
        if place == self.place and step == self.last_step:
            os.kill(os.getpid(), self.number)


class Slow(Callback):
    """Sleeps in one of the phases of a run."""

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.sleep_in("step")

    def on_validate_batch_start(self, trainer, model, batch, batch_idx):
        self.sleep_in("validation")

    def on_save_checkpoint(self, trainer, state_dict):
        self.sleep_in("save")

    def sleep_in(self, phase: str) -> None:
        if phase == self.phase:
            time.sleep(PAUSE_S)


class Hold(Callback):
    """Waits at a step, in a run that must not end before its test has come to something.

    Args:
        at_step: The step.
        go: The file that it waits for.
    """

    def __init__(self, at_step: int, go: Path) -> None:
        self.at_step = at_step
        self.go = go

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        while trainer.global_step == self.at_step and not self.go.exists():
            time.sleep(0.005)


class FillDisk(Callback):
    """Lets the disk of checkpoints refuse whatever is written for some steps."""

    def __init__(self, first: int, end: int) -> None:
        self.steps = range(first, end)
        self.is_full = False
        self.write = disk.write

    def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
        disk.write = self.refuse

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.is_full = trainer.global_step in self.steps

    def on_fit_end(self, trainer, loop):
        disk.write = self.write

    def refuse(self, descriptor: int, view: Any) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.write(descriptor, view)
