"""Data shared by supervisor and child: the launch spec, the shared status and the report."""

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

from modelzoo_trainer.base.regular_files import read_bytes
from modelzoo_trainer.errors import CheckpointMismatch, ConfigError, HookError

OPTION: Final = "--supervised"
UNKNOWN: Final = -1.0  # in the shared status
_MISFIT: Final = "is set by the supervisor and cannot be given by hand. Omit it."
_HOPELESS: Final = (CheckpointMismatch, ConfigError, HookError, ImportError, SyntaxError)
_LONGEST: Final = 2000  # characters of a message


# ---- from the supervisor, on the command line


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """What a child is started with."""

    folder: str  # of the supervisor; the child writes its files there
    attempt: int  # from 1
    supervisor: int  # its process id; the child dies with it
    descriptor: int  # of the shared status
    trainer: int = 0  # index of the first unfinished trainer
    is_restart: bool = False  # whether the run has written a checkpoint before
    checkpoint: str | None = None  # the newest, if known
    # start of the first fit of that trainer in any attempt, on the monotonic clock, which all
    # processes share; None = not started yet
    began: float | None = None

    def to_words(self) -> list[str]:
        """Return it as command-line arguments."""
        return [OPTION, json.dumps(asdict(self))]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the argument.

        Raises:
            ValueError: If it was not written by a supervisor.
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
        """The file of the child's report."""
        return Path(self.folder, f"attempt_{self.attempt}.json")

    @property
    def stacks(self) -> Path:
        """The file for the stacks of a child that crashes in native code, or hangs."""
        return Path(self.folder, f"stacks_{self.attempt}.txt")


def without_launch_spec(words: list[str]) -> list[str]:
    """Return the command-line arguments as the user wrote them."""
    if OPTION not in words:
        return words
    at = words.index(OPTION)
    return words[:at] + words[at + 2 :]


# ---- from the child, at any time, in memory that outlives it


class TimeKind(enum.IntEnum):
    """Kinds of time."""

    STARTUP = 0
    DATA = 1
    FIRST_STEP = 2
    STEPS = 3
    SAVING = 4
    VALIDATION = 5
    OTHER = 6
    CUT_OFF = 7  # a step that did not finish


class SharedStatus(ctypes.Structure):
    """Numbers that the child writes and the supervisor reads, even after the child has died.

    Every field is a double, so writes are atomic. The memory has no name in any file system; the
    child inherits its file descriptor.
    """

    heartbeat: float  # rises while the interpreter runs
    is_hung: float  # set by the child's own watchdog
    num_done: float  # trainers that have finished, in all attempts
    kind: float  # what the time is currently spent on
    since: float  # monotonic clock: start of that
    trainer: float  # index of the trainer of the fields below
    start_step: float  # first step of its fit
    step: float  # the last completed one
    saved_step: float  # of the newest checkpoint that this process has committed
    spent_at_start: float  # seconds of STEPS when that fit started
    spent_at_save: float  # likewise when that checkpoint was saved
    median_s: float  # of a batch
    began: float  # monotonic clock: start of that trainer's first fit in this process
    _fields_ = [  # ctypes requires a list
        *((name, ctypes.c_double) for name in __annotations__),
        ("seconds", ctypes.c_double * len(TimeKind)),
    ]
    descriptor: int

    @classmethod
    def attach(cls, descriptor: int) -> Self:
        """Map the status of a file descriptor, which `close` closes."""
        shared = cls.from_buffer(mmap.mmap(descriptor, mmap.PAGESIZE))
        shared.descriptor = descriptor
        return shared

    @classmethod
    def create(cls) -> Self:
        """Create the status of a new process."""
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
        """Close the file descriptor; the memory is freed with its last reference."""
        os.close(self.descriptor)

    def begin_trainer(self, number: int) -> None:
        """Set the index of the trainer and reset the steps."""
        self.start_step = self.step = self.saved_step = UNKNOWN
        self.spent_at_start = self.spent_at_save = self.median_s = self.began = UNKNOWN
        self.trainer = number

    def switch(self, kind: TimeKind) -> float:
        """Count time as `kind` from now on; return the seconds of the kind that ends."""
        now = time.monotonic()
        elapsed = now - self.since
        self.seconds[int(self.kind)] += elapsed
        self.kind = kind
        self.since = now
        return elapsed

    def end(self) -> None:
        """Count the time up to now, after the process has ended."""
        if self.kind in (TimeKind.FIRST_STEP, TimeKind.STEPS):
            self.kind = TimeKind.CUT_OFF
        self.switch(TimeKind.OTHER)


def known(value: float) -> int | None:
    """Return a field as an integer, or None if it is unknown."""
    return None if value == UNKNOWN else int(value)


# ---- from the child, a JSON file


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildFailure:
    """The exception that ended a child."""

    kind: str  # qualified name of its type
    message: str  # shortened
    step: int | None  # the global step at that time; None = before training
    # whether another attempt may succeed without a fix
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
class ChildReport:
    """The child's report; the defaults stand for a child that wrote none."""

    pid: int = 0
    checkpoint: str | None = None  # the newest that it has committed
    # what ended a trainer early, such as "SIGTERM" or "stop file"
    interrupted: str | None = None
    hung: str | None = None  # what its watchdog found
    failure: ChildFailure | None = None

    def write(self, path: Path) -> None:
        """Write the report atomically."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a child's report."""
        try:
            raw = json.loads(read_bytes(path))
            failure = raw.pop("failure")
            return cls(**raw, failure=None if failure is None else ChildFailure(**failure))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return cls()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically.

    Raises:
        OSError: If it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
