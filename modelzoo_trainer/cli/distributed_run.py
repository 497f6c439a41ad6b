"""Run a command in several processes: one of them reports errors, and all of them exit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from modelzoo_trainer.base.exit_codes import FAILED, INTERRUPTED, WRONG_USE, exit_code
from modelzoo_trainer.base.secrets import hide_in_text
from modelzoo_trainer.base.stderr import say
from modelzoo_trainer.cli.signals import StopRequests
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.base.devices import Failure, World

Report = Callable[[str, int], int]
"""Prints why a process exits, and returns the exit code."""


def report_alone(message: str, code: int) -> int:
    """Print why the only process exits, and return its exit code."""
    say(hide_in_text(message))
    return code


class DistributedRun:
    """This process in a distributed run.

    An error is printed once, by the process that failed first. The others exit silently, whatever
    errors follow in them.
    """

    def __init__(self, processes: World, requests: StopRequests) -> None:
        self._processes = processes
        self._requests = requests
        self._has_reported = False
        processes.coordinator.on_abort = self._report_failure
        processes.describe = _describe

    def run(self, task: Callable[[Report], int]) -> int:
        """Run a command, and return its exit code if the process continues."""
        try:
            code = task(self._report)
        except ConfigError as error:
            code = self._report(str(error), WRONG_USE)
        except KeyboardInterrupt:
            code = self._processes.fail("stopped by Ctrl-C", code=INTERRUPTED, kind="stop").code
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else FAILED
            code = self._processes.fail("stopped by a signal", code=code, kind="stop").code
        except BaseException as error:  # noqa: BLE001  # the process ends with it
            code = self._fail(error)
        if self._requests.owns_process:
            self._requests.keep_code(code)
            self._processes.leave(code)
        return code

    def _report(self, message: str, code: int) -> int:
        first = self._processes.fail(message, code=code)
        self._report_failure(first)
        return first.code

    def _fail(self, error: BaseException) -> int:
        first = self._processes.fail_by(error)
        rank = self._processes.rank
        is_first = first.kind == "hang" or first.message == _describe(error)[0]
        if is_first and first.rank == first.reporting_rank == rank and not self._has_reported:
            self._has_reported = True
            say(str(first) if first.kind == "hang" else f"process {rank} failed:")
            sys.excepthook(type(error), error, error.__traceback__)
        elif first.kind != "stop":  # the sender of the signal knows
            self._report_failure(first)
        return first.code

    def _report_failure(self, failure: Failure) -> None:
        """Print why the run failed, if this process reports it and has not yet."""
        if failure.reporting_rank == self._processes.rank and not self._has_reported:
            self._has_reported = True
            say(hide_in_text(str(failure)))


def _describe(error: BaseException) -> tuple[str, int]:
    """Return the message of an error and the exit code."""
    from backends.errors import UnsplittableBatch

    if isinstance(error, (ConfigError, UnsplittableBatch)):
        return str(error), WRONG_USE
    return f"{type(error).__name__}: {error}", FAILED


def _end_at_once(name: str, joined: Sequence[World]) -> None:
    """Exit because of a signal, after notifying the other processes."""
    code = exit_code(name)
    for processes in joined:
        code = processes.fail(f"stopped by {name}", code=code, kind="stop").code
    os._exit(code)


def is_distributed() -> bool:
    """Return whether a launcher started this process as one of several.

    Raises:
        ConfigError: If the launcher's environment variables are inconsistent.
    """
    from backends.coordination.launch import read_launch
    from backends.errors import BackendError

    try:
        return read_launch() is not None
    except BackendError as error:
        raise ConfigError(str(error)) from None


def was_restarted(processes: World | None) -> bool:
    """Return whether a launcher has started this run before. Collective with several processes.

    `processes`: None = a single process.

    Raises:
        BackendError: If the launcher's environment variables are inconsistent.
    """
    from backends.coordination.launch import num_restarts

    is_here = num_restarts() > 0
    return is_here if processes is None else processes.any_true(is_here)  # counts may differ


def job_requeues() -> int:
    """Return how often the scheduler has queued the job of this process again.

    Raises:
        BackendError: If the scheduler's environment variables are invalid.
    """
    from backends.coordination.launch import num_requeues

    return num_requeues()


def end_with_launcher() -> None:
    """Exit when the launcher that started this process is killed."""
    from backends.coordination.orphans import watch_launcher

    watch_launcher()


def run_distributed(task: Callable[[World, Report], int], requests: StopRequests) -> int:
    """Run a command together with other processes and return the exit code.

    Raises:
        ConfigError: If the others cannot be reached.
    """
    from backends.coordination.launch import be_quiet

    if requests.owns_process:
        be_quiet()
    joined: list[World] = []
    requests.watch(lambda name: _end_at_once(name, joined))
    from modelzoo_trainer.base.devices import BackendError, join

    try:
        processes = join()
    except BackendError as error:
        raise ConfigError(str(error)) from None
    assert processes is not None  # as `is_distributed` says
    joined.append(processes)
    run = DistributedRun(processes, requests)
    return run.run(lambda report: task(processes, report))
