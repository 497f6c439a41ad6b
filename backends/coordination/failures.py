"""The first failure of a run, and how a process ends because of it."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from ..errors import BackendError

_ON_ABORT_S: Final = 3.0
_STANDARD_ERROR: Final = 2


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run ends.

    Args:
        rank: The failed rank.
        message: What happened.
        code: The exit code of all processes.
        kind: "error", "stop" (requested), "hang", or "lost": the process is gone, or has lost the
            connection to others.
        reporter: The rank that detected the failure, if not the failed one.
    """

    rank: int
    message: str
    code: int = 1
    kind: str = "error"
    reporter: int | None = None

    @property
    def reporting_rank(self) -> int:
        """The rank that reports the failure to the user: the failed one may be unable to."""
        return self.rank if self.reporter is None else self.reporter

    def __str__(self) -> str:
        """Return the failure as text."""
        named = f"process {self.rank}"
        return self.message if self.message.startswith(named) else f"{named}: {self.message}"

    def as_entry(self) -> dict[str, Any]:
        """Return the failure as JSON values."""
        return asdict(self)


class RunFailed(BackendError):
    """Another process has failed, so this one ends as well."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"another process failed. {failure}")
        self.failure = failure


def gone(rank: int, reporter: int) -> Failure:
    """Return the failure of a rank whose process does not exist any more."""
    message = f"process {rank} is gone (it was killed or has crashed)"
    return Failure(rank, message, kind="lost", reporter=reporter)


def silent(rank: int, seconds: float, reporter: int) -> Failure:
    """Return the failure of a rank without heartbeats."""
    message = (
        f"process {rank} has sent no heartbeat for {seconds:g} s (it was stopped, or its host is "
        f"gone)"
    )
    return Failure(rank, message, kind="lost", reporter=reporter)


def stopped(rank: int, seconds: float, reporter: int) -> Failure:
    """Return the failure of a rank stopped by a signal for too long."""
    message = f"process {rank} was stopped by a signal and not continued for {seconds:g} s"
    return Failure(rank, message, kind="lost", reporter=reporter)


def dump_stacks(rank: int, failure: Failure) -> None:
    """Write the stacks of all threads to standard error, not mixed with other ranks' stacks.

    `faulthandler` writes a few characters at a time.
    """
    head = f"--- stacks of process {rank} ({json.dumps(str(failure))}):\n"
    with suppress(Exception), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        os.write(_STANDARD_ERROR, head.encode() + file.read())


def end_process(failure: Failure, on_abort: Callable[[Failure], None] | None) -> None:
    """End this process at once, whatever its main thread does; does not return.

    `on_abort` is called first, with a short time limit.
    """

    def speak() -> None:
        if on_abort is not None:
            with suppress(Exception):
                on_abort(failure)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()

    # In a thread: the stream's lock may be held by a blocked thread.
    thread = threading.Thread(target=speak, name="on abort", daemon=True)
    thread.start()
    thread.join(_ON_ABORT_S)
    os._exit(failure.code)
