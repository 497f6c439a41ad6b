"""How a child ended, whether to restart it, and after how long."""

from __future__ import annotations

import enum
import re
import signal
from dataclasses import dataclass
from typing import Final

from modelzoo_trainer.base.exit_codes import (
    DONE,
    FAILED,
    INTERRUPTED,
    PREEMPTED,
    STOP_SIGNALS,
    WRONG_USE,
    exit_code,
)
from modelzoo_trainer.tools.supervisor.protocol import ChildFailure, ChildReport

_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]+")
_REQUESTS: Final = frozenset(one.name for one in STOP_SIGNALS)


class Outcome(enum.StrEnum):
    """Ways in which a child can end."""

    DONE = "done"
    STOPPED = "stopped on request"
    INVALID_CONFIG = "invalid configuration"
    NOT_RETRYABLE = "not retryable"
    CRASHED = "crashed"
    KILLED = "killed"
    HUNG = "hung"


FAILURES: Final = frozenset({Outcome.CRASHED, Outcome.KILLED, Outcome.HUNG})
"""Outcomes after which the run is restarted."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a child ended."""

    outcome: Outcome
    cause: str
    exit_code: int = FAILED  # that of the command, if the run ends with this
    # equal for the same exception at the same step; None = there was no exception
    fingerprint: tuple[str, str, int | None] | None = None


def classify(
    code: int,
    report: ChildReport,
    *,
    passed_on: tuple[str, ...] = (),
    hung: str | None = None,
    is_cut: bool = False,
) -> Ending:
    """Return how a child ended.

    A stop request sent to the child alone (SIGTERM, SIGINT or SIGUSR1, a stop file, a time limit)
    ends the run as well: the child has written its checkpoint. Only ends that nobody requested
    are failures.

    `code`: exit code of the process; below 0 = the signal that killed it. `is_cut`: whether it has
    trained but not finished all trainers: exit code 0 then comes from a `sys.exit` in user code.
    """
    name = _signal_name(code)
    if code == DONE and is_cut and not passed_on:
        return Ending(Outcome.CRASHED, "ended with exit code 0 before the run was finished")
    if code == DONE:
        return Ending(Outcome.DONE, "finished", DONE)
    if passed_on:
        return _stopped(passed_on[0])
    if hung is not None:
        return Ending(Outcome.HUNG, f"hung: {hung}")
    if code in (INTERRUPTED, PREEMPTED):
        name = "SIGINT" if code == INTERRUPTED else "SIGTERM"
        return _stopped(report.interrupted or name)
    if name in _REQUESTS:
        return _stopped(name)
    if code < 0:
        guess = " (possibly out of memory)" if name == "SIGKILL" else ""
        return Ending(Outcome.KILLED, f"killed by {name}{guess}")
    return _failed(code, report.failure)


def _stopped(by: str) -> Ending:
    return Ending(Outcome.STOPPED, f"stopped by {by}", exit_code(by))


def _failed(code: int, failure: ChildFailure | None) -> Ending:
    if code == WRONG_USE or (failure is not None and failure.is_config):
        return Ending(Outcome.INVALID_CONFIG, "the command or the file is invalid", WRONG_USE)
    if failure is None:
        return Ending(Outcome.CRASHED, f"ended with exit code {code}")
    lines = failure.message.splitlines()
    cause = f"{failure.kind}: {lines[0]}" if lines else failure.kind
    return Ending(
        Outcome.CRASHED if failure.can_heal else Outcome.NOT_RETRYABLE,
        cause,
        fingerprint=(failure.kind, _ADDRESS.sub("0x", failure.message), failure.step),
    )


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0

Progress = tuple[int, int]
"""The index of the current trainer, and the later of its last step and its newest checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether to restart after an attempt, and why."""

    is_again: bool
    pause_s: float = 0.0
    reason: str = ""


class Policy:
    """Decide on restarts: a budget of restarts in a row without progress.

    Progress means getting further than any previous attempt, so a run that keeps failing ends
    eventually. Restart at once after progress, else after 1, 2, 4, ... and at most 60 seconds,
    because the cause may be temporary.
    """

    def __init__(self) -> None:
        self._best: Progress | None = None
        self._num_without_progress = 0
        self._num_attempts = 0
        self._last: Ending | None = None

    def decide(self, ending: Ending, start: Progress, end: Progress, budget: int) -> Decision:
        """Decide what to do after an attempt."""
        before, self._last = self._last, ending
        best = start if self._best is None else max(start, self._best)
        has_progressed = end > best
        self._best = max(end, best)
        if ending.outcome not in FAILURES:
            return Decision(is_again=False)
        is_restart = self._num_attempts > 0
        self._num_attempts += 1
        if has_progressed:
            self._num_without_progress = 0
            return Decision(is_again=True, reason=_limit(budget))
        self._num_without_progress += is_restart
        is_same = before is not None and before.fingerprint == ending.fingerprint
        if is_same and ending.fingerprint is not None:
            return Decision(
                is_again=False,
                reason="the same error occurred twice in a row at the same step",
            )
        if self._num_without_progress >= budget:
            return Decision(is_again=False, reason=f"{_restarts(budget)} in a row without progress")
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._num_without_progress)
        limit = _limit(budget - self._num_without_progress)
        return Decision(is_again=True, pause_s=pause_s, reason=limit)


def _limit(num: int) -> str:
    return f"giving up after {_restarts(num, 'more ')} in a row without progress"


def _restarts(num: int, more: str = "") -> str:
    return f"{num} {more}restart{'' if num == 1 else 's'}"
