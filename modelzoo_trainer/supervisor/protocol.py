"""What supervisor and child exchange: the launch spec, the shared status and the child's report."""

from __future__ import annotations

import ctypes
import enum
import json
import mmap
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from modelzoo_trainer.errors import CheckpointMismatch, ConfigError, HookError

OPTION: Final = "--supervised"
UNKNOWN: Final = -1.0  # in the shared status
_MISFIT: Final = "is for a supervisor to give, and this is nothing that one gave. Leave it out."
_HOPELESS: Final = (CheckpointMismatch, ConfigError, HookError, ImportError, SyntaxError)
_LONGEST: Final = 2000  # characters of a message


# ---- from the supervisor, on the command line


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """What a child needs to know."""

    folder: str  # of the supervisor; the child writes its files there
    attempt: int  # from 1
    supervisor: int  # the process that it must not survive
    descriptor: int  # of the shared status
    trainer: int = 0  # the first trainer of the file that is not done yet
    is_restart: bool = False  # whether the run has written a checkpoint before
    checkpoint: str | None = None  # the newest, if known
    # when the first attempt at that trainer began its fit, on the monotonic clock, which all
    # processes share; None = none has
    began: float | None = None

    def to_words(self) -> list[str]:
        """Return it as words of a command line."""
        return [OPTION, json.dumps(asdict(self))]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what the words say.

        Raises:
            ValueError: If a supervisor did not write them.
        """
        try:
            made = cls(**json.loads(text))
        except (ValueError, TypeError):
            raise ValueError(f"{OPTION} {_MISFIT}") from None
        numbers = (made.attempt, made.supervisor, made.descriptor, made.trainer)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{OPTION} {_MISFIT}")
        return made

    @property
    def report(self) -> Path:
        """The file in which the child says what happened to it."""
        return Path(self.folder, f"attempt_{self.attempt}.json")

    @property
    def stacks(self) -> Path:
        """The file for the stacks of a child that crashes in native code, or hangs."""
        return Path(self.folder, f"stacks_{self.attempt}.txt")


def without_launch_spec(words: list[str]) -> list[str]:
    """Return the words of a command line as the user wrote them."""
    if OPTION not in words:
        return words
    at = words.index(OPTION)
    return words[:at] + words[at + 2 :]


# ---- from the child, at any time, in memory that outlives it


class Kind(enum.IntEnum):
    """What a process spends its time on."""

    STARTUP = 0
    DATA = 1
    FIRST_STEP = 2
    STEPS = 3
    SAVING = 4
    VALIDATION = 5
    OTHER = 6
    CUT_OFF = 7  # a step in which it died


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
    _fields_ = [  # ctypes wants a list
        *((name, ctypes.c_double) for name in __annotations__),
        ("seconds", ctypes.c_double * len(Kind)),
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
        self.start_step = self.step = self.saved_step = UNKNOWN
        self.spent_at_start = self.spent_at_save = self.median_s = self.began = UNKNOWN
        self.trainer = number

    def switch(self, kind: Kind) -> float:
        """Count the time from now on as `kind`, and return the seconds of what ends with this."""
        now = time.monotonic()
        elapsed = now - self.since
        self.seconds[int(self.kind)] += elapsed
        self.kind = kind
        self.since = now
        return elapsed

    def end(self) -> None:
        """Count the time up to now, for a process that has ended."""
        if self.kind in (Kind.FIRST_STEP, Kind.STEPS):
            self.kind = Kind.CUT_OFF
        self.switch(Kind.OTHER)


def known(value: float) -> int | None:
    """Return a field as an integer, or None if it is unknown."""
    return None if value == UNKNOWN else int(value)


# ---- from the child, a JSON file


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The exception that ended a child."""

    kind: str  # its type's name, with the module
    message: str  # its text, shortened
    step: int | None  # the global step at that time; None = before training
    # whether another attempt may fare better: not if something is to be mended first
    can_heal: bool
    is_config: bool

    @classmethod
    def of(cls, error: BaseException, step: int | None) -> Self:
        """Return the record of an exception."""
        kind = type(error)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        return cls(
            kind=module + kind.__qualname__,
            message=str(error)[:_LONGEST],
            step=step,
            can_heal=not isinstance(error, _HOPELESS),
            is_config=isinstance(error, ConfigError),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a child says happened to it; the defaults are what is known of one that said nothing."""

    pid: int = 0
    checkpoint: str | None = None  # the newest that it has committed
    # what ended a trainer before its time, such as "SIGTERM" or "stop file"
    interrupted: str | None = None
    hung: str | None = None  # what its watchdog found
    failure: Failure | None = None

    def write(self, path: Path) -> None:
        """Write it: whole, or not at all."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what a child wrote."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            failure = raw.pop("failure")
            return cls(**raw, failure=None if failure is None else Failure(**failure))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return cls()


def write_json(path: Path, value: Any) -> None:
    """Write a file whole, or not at all.

    Raises:
        OSError: If that fails.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
