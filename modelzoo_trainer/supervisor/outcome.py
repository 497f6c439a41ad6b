"""How a child ended, whether it is started again, and after how long."""

from __future__ import annotations

import enum
import re
import signal
from dataclasses import dataclass
from typing import Final

from modelzoo_trainer.exit_codes import (
    DONE,
    FAILED,
    INTERRUPTED,
    PREEMPTED,
    STOP_SIGNALS,
    WRONG_USE,
    exit_code,
)
from modelzoo_trainer.supervisor.protocol import Failure, Report

_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]+")
_REQUESTS: Final = frozenset(one.name for one in STOP_SIGNALS)


class Outcome(enum.StrEnum):
    """The classes of ends."""

    DONE = "done"
    STOPPED = "stopped on request"
    WRONG_CONFIG = "wrong configuration"
    CANNOT_HEAL = "cannot heal by itself"
    CRASHED = "crashed"
    KILLED = "killed"
    HUNG = "hung"


FAILURES: Final = frozenset({Outcome.CRASHED, Outcome.KILLED, Outcome.HUNG})
"""Those after which the run is started again."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known of the end of a child."""

    outcome: Outcome
    cause: str
    exit_code: int = FAILED  # that of the command, if the run ends with this
    # equal for the same exception at the same step; None = there was no exception
    fingerprint: tuple[str, str, int | None] | None = None


def classify(
    code: int,
    report: Report,
    *,
    passed_on: tuple[str, ...] = (),
    hung: str | None = None,
    is_cut: bool = False,
) -> Ending:
    """Return how a child ended.

    A child that somebody else asks to stop (SIGTERM, SIGINT or SIGUSR1 to it alone, a stop file,
    the end of its time) ends the run as well: whoever stops the process that trains wants the
    training to stop, and it has written its checkpoint. Only what nobody asked for is a failure.

    `code`: of its process; below 0 = the signal that killed it. `is_cut`: whether it has trained,
    and not all of its trainers have come to their end: then an exit code 0 is that of somebody's
    `sys.exit`.
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


def _failed(code: int, failure: Failure | None) -> Ending:
    if code == WRONG_USE or (failure is not None and failure.is_config):
        return Ending(Outcome.WRONG_CONFIG, "the command or the file is wrong", WRONG_USE)
    if failure is None:
        return Ending(Outcome.CRASHED, f"ended with exit code {code}")
    lines = failure.message.splitlines()
    cause = f"{failure.kind}: {lines[0]}" if lines else failure.kind
    return Ending(
        Outcome.CRASHED if failure.can_heal else Outcome.CANNOT_HEAL,
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
"""The trainer at hand, and the later of its last step and its newest checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens after an attempt."""

    is_again: bool
    pause_s: float = 0.0
    reason: str = ""


class Policy:
    """Decides on restarts: a budget of those in a row without progress.

    Progress is more than any attempt before had, so a run that fails again and again ends in any
    case. After progress it is started again at once; without, after 1, 2, 4, ... and at most 60
    seconds, because a machine's trouble may be temporary.
    """

    def __init__(self) -> None:
        self._best: Progress | None = None
        self._num_fruitless = 0
        self._num_attempts = 0
        self._last: Ending | None = None

    def decide(self, ending: Ending, start: Progress, end: Progress, budget: int) -> Decision:
        """Return what follows an attempt."""
        before, self._last = self._last, ending
        best = start if self._best is None else max(start, self._best)
        has_progressed = end > best
        self._best = max(end, best)
        if ending.outcome not in FAILURES:
            return Decision(is_again=False)
        is_restart = self._num_attempts > 0
        self._num_attempts += 1
        if has_progressed:
            self._num_fruitless = 0
            return Decision(is_again=True, reason=f"{_restarts(budget)} without progress left")
        self._num_fruitless += is_restart
        is_same = before is not None and before.fingerprint == ending.fingerprint
        if is_same and ending.fingerprint is not None:
            return Decision(
                is_again=False,
                reason="the same error at the same step twice in a row will not heal by itself",
            )
        if self._num_fruitless >= budget:
            return Decision(is_again=False, reason=f"{_restarts(budget)} in a row without progress")
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._num_fruitless)
        left = f"{_restarts(budget - self._num_fruitless)} without progress left"
        return Decision(is_again=True, pause_s=pause_s, reason=left)


def _restarts(num: int) -> str:
    return "1 restart" if num == 1 else f"{num} restarts"
