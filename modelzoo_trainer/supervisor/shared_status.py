"""Memory that supervisor and child share: what is known of a child at any instant of its life."""

from __future__ import annotations

import enum
import mmap
import os
import tempfile
import time
from typing import Final, Self

_SIZE: Final = mmap.PAGESIZE


class Kind(enum.IntEnum):
    """What a process spends its time on."""

    STARTUP = 0
    DATA = 1
    FIRST_STEP = 2
    STEPS = 3
    SAVING = 4
    VALIDATION = 5
    OTHER = 6


class Field(enum.IntEnum):
    """The numbers of a page; the seconds of each `Kind` follow."""

    BEAT = 0  # rises while the interpreter runs
    IS_HUNG = 1  # the child's own watchdog has found that
    KIND = 2  # of what goes on
    SINCE = 3  # monotonic clock: when that began
    TRAINER = 4  # index of the one that the steps are of
    START_STEP = 5  # at which its fit began; NONE = not yet
    STEP = 6  # the last one that was taken
    SAVED_STEP = 7  # of the newest checkpoint that this process has committed
    SPENT_AT_START = 8  # seconds of STEPS when that fit began
    SPENT_AT_SAVE = 9  # likewise when that checkpoint was made
    MEDIAN_S = 10  # of a batch; NONE = not known
    NUM_DONE = 11  # trainers that have come to their end, in earlier attempts as well
    BEGAN = 12  # monotonic clock: when the first fit of that trainer in this process began
    SECONDS = 16


NONE: Final = -1.0
_NOT_YET: Final = (
    Field.START_STEP,
    Field.STEP,
    Field.SAVED_STEP,
    Field.SPENT_AT_START,
    Field.SPENT_AT_SAVE,
    Field.MEDIAN_S,
    Field.BEGAN,
)


class Page:
    """A page of memory with the numbers that `Field` names.

    It has no name in any file system, and it outlives the child.

    `descriptor`: of the memory, inherited by the child; closed with the page.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _SIZE)
        self.values = memoryview(self._memory).cast("d")

    @classmethod
    def create(cls) -> Self:
        """Return a page of which nothing is known yet, and whose clock runs."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("page")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, _SIZE)
        page = cls(descriptor)
        for field in _NOT_YET:
            page.values[field] = NONE
        page.values[Field.SINCE] = time.monotonic()
        return page

    def close(self) -> None:
        """Give the memory back."""
        self.values.release()
        self._memory.close()
        os.close(self.descriptor)

    def switch(self, kind: Kind) -> float:
        """Count the time from now on as that of `kind`, and return the seconds before it."""
        values = self.values
        now = time.monotonic()
        elapsed = now - values[Field.SINCE]
        values[Field.SECONDS + int(values[Field.KIND])] += elapsed
        values[Field.KIND] = kind
        values[Field.SINCE] = now
        return elapsed

    def spent(self, kind: Kind) -> float:
        """Return the seconds of a kind, without the stretch at hand."""
        return self.values[Field.SECONDS + kind]

    def number(self, field: Field) -> int | None:
        """Return a field as a whole number, or None if it is not known."""
        value = self.values[field]
        return None if value == NONE else int(value)

    def begin_trainer(self, number: int) -> None:
        """Forget the steps of the trainer before, and note which one is at hand."""
        for field in _NOT_YET:
            self.values[field] = NONE
        self.values[Field.TRAINER] = number
