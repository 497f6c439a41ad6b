"""Memory that supervisor and child share: where the child is, and what its time went to."""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import tempfile
import time
from typing import Final, Self

UNKNOWN: Final = -1.0


class Kind(enum.IntEnum):
    """What a process spends its time on."""

    STARTUP = 0
    DATA = 1
    FIRST_STEP = 2
    STEPS = 3
    SAVING = 4
    VALIDATION = 5
    OTHER = 6


class SharedStatus(ctypes.Structure):
    """Numbers that the child writes and the supervisor reads, at any time and after its death.

    Every field is a double, so it is written as a whole. The memory has no name in any file
    system; the child inherits its file descriptor.
    """

    heartbeat: float  # rises while the interpreter runs
    is_hung: float  # the child's own watchdog has found that
    num_done: float  # trainers that have finished, in earlier attempts as well
    kind: float  # of what is in progress
    since: float  # monotonic clock: when that began
    trainer: float  # index of the one that the fields below belong to
    start_step: float  # at which its fit began
    step: float  # the last completed one
    saved_step: float  # of the newest checkpoint that this process has committed
    spent_at_start: float  # seconds of STEPS when that fit began
    spent_at_save: float  # likewise when that checkpoint was made
    median_s: float  # of a batch
    began: float  # monotonic clock: when the first fit of that trainer in this process began
    _of_process = ("heartbeat", "is_hung", "num_done", "kind", "since", "trainer")
    _of_trainer = (
        *("start_step", "step", "saved_step", "spent_at_start", "spent_at_save"),
        *("median_s", "began"),
    )
    _fields_ = [  # ctypes wants a list
        *((name, ctypes.c_double) for name in (*_of_process, *_of_trainer)),
        ("_seconds", ctypes.c_double * len(Kind)),
    ]
    descriptor: int

    @classmethod
    def attach(cls, descriptor: int) -> Self:
        """Return the status behind a file descriptor, which `close` closes."""
        shared = cls.from_buffer(mmap.mmap(descriptor, mmap.PAGESIZE))
        shared.descriptor = descriptor
        return shared

    @classmethod
    def create(cls) -> Self:
        """Return the status of a process that starts now."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("status")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, mmap.PAGESIZE)
        shared = cls.attach(descriptor)
        shared.begin_trainer(0)
        shared.since = time.monotonic()
        return shared

    def close(self) -> None:
        """Close the file descriptor; the memory goes with the last object that refers to it."""
        os.close(self.descriptor)

    def begin_trainer(self, number: int) -> None:
        """Set the index of the trainer, and forget the steps of the one before."""
        for name in self._of_trainer:
            setattr(self, name, UNKNOWN)
        self.trainer = number

    def switch(self, kind: Kind) -> float:
        """Count the time from now on as `kind`, and return the seconds of what ends with this."""
        now = time.monotonic()
        elapsed = now - self.since
        self._seconds[int(self.kind)] += elapsed
        self.kind = kind
        self.since = now
        return elapsed

    def spent(self, kind: Kind) -> float:
        """Return the seconds of a kind, without those since the last switch."""
        return float(self._seconds[kind])


def known(value: float) -> int | None:
    """Return a field as an integer, or None if it is unknown."""
    return None if value == UNKNOWN else int(value)
