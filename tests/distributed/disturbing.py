"""Callbacks that disturb one process of a run, and tell what every one of them did."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

from modelzoo_trainer import Callback

FOREVER_S = 1000.0


class Tell(Callback):
    """Writes a line for each step: the step and a digest of the weights.

    Args:
        path: The beginning of the file's name; the rest is the process's number.
        pause: Seconds that a step takes at least.
        limit: A file with a step: none is taken after it until the file has a higher one, or is
            gone, or all processes have decided something, or one has failed.
    """

    def __init__(self, path: str, pause: float = 0.0, limit: str | None = None) -> None:
        self.path = path
        self.pause = pause
        self.limit = None if limit is None else Path(limit)

    def _write(self, trainer: Any, text: str) -> None:
        with Path(f"{self.path}.{trainer.backend.comm.rank}").open("a", encoding="ascii") as file:
            file.write(f"{text}\n")

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        self._write(trainer, f"begin {trainer.global_step} {_digest(trainer)}")

    def on_step_boundary(self, trainer):
        self._write(trainer, f"step {trainer.global_step} {_digest(trainer)}")
        time.sleep(self.pause)
        deadline = time.monotonic() + FOREVER_S
        while trainer.global_step >= self._last_step() and not _is_told(trainer):
            assert time.monotonic() < deadline, "nobody lets it go on"
            time.sleep(0.005)

    def on_fit_end(self, trainer, loop):
        self._write(trainer, f"end {trainer.global_step} {trainer.interrupted}")

    def _last_step(self) -> float:
        try:
            return math.inf if self.limit is None else int(self.limit.read_text())
        except FileNotFoundError:
            return math.inf


def _is_told(trainer: Any) -> bool:
    """Return whether this process ends, or does something, at its next decision point."""
    control = trainer.backend.comm.world.coordinator
    return control.failure is not None or bool(control._consensus._due)


def _digest(trainer: Any) -> str:
    """Return a digest of the whole weights."""
    state = trainer.backend.host_state(trainer.model.state_dict())
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(state[name].numpy().tobytes())
    return digest.hexdigest()


class Disturb(Callback):
    """Does something to one process, at one moment.

    Args:
        how: A signal's name, "raise", "exit", "hang", "late", "full", or "" = nothing.
        where: "step", "validation" or "save".
        rank: The process.
        step: At the first such moment from this step on.
        mark: A file: nothing is done if it exists, and it is made before anything is done.
    """

    def __init__(
        self,
        how: str = "",
        where: str = "step",
        rank: int = 1,
        step: int = 9,
        mark: str | None = None,
    ) -> None:
        self.how = how
        self.where = where
        self.rank = rank
        self.step = step
        self.mark = None if mark is None else Path(mark)
        self.is_done = not how

    def _come_to(self, where: str, trainer: Any) -> None:
        is_here = where == self.where and trainer.backend.comm.rank == self.rank
        if self.is_done or not is_here or trainer.global_step < self.step:
            return
        if self.mark is not None:
            if self.mark.exists():
                return
            self.mark.touch()
        self.is_done = True
        self._act()

    def _act(self) -> None:
        if self.how == "raise":
            raise ValueError("this is the first error")
        if self.how == "exit":
            os._exit(7)
        if self.how == "hang":
            time.sleep(FOREVER_S)  # here it hangs
        elif self.how == "late":
            time.sleep(1.5)
        elif self.how == "full":
            _fill_the_disk()
        else:
            os.kill(os.getpid(), getattr(signal, self.how))

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self._come_to("step", trainer)

    def on_validate_batch_start(self, trainer, model, batch, batch_idx):
        self._come_to("validation", trainer)

    def on_save_checkpoint(self, trainer, state_dict):
        self._come_to("save", trainer)


def _fill_the_disk() -> None:
    """Have the next file of tensors that this process writes find the disk full."""
    from modelzoo_trainer.checkpointing import distributed

    write = distributed.write_share

    def refuse(*args: Any) -> Any:
        distributed.write_share = write
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    distributed.write_share = refuse
