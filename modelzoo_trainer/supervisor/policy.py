"""When a failed run is started again, and after how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from modelzoo_trainer.supervisor.outcome import FAILURES, Ending

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0

Progress = tuple[int, int]
"""The trainer at hand, and the later of its last step and its newest checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens after an attempt.

    Args:
        is_again: Whether another one is made.
        pause_s: After so long.
        reason: Why, or why not.
    """

    is_again: bool
    pause_s: float = 0.0
    reason: str = ""


class Policy:
    """Decides on restarts: a budget of those in a row without progress.

    Progress is more than any attempt before had, so a run that fails again and again ends in any
    case. After progress it is started again at once; without, after 1, 2, 4, ... and at most 60
    seconds, because what ails a machine may pass.
    """

    def __init__(self) -> None:
        self._best: Progress | None = None
        self._num_fruitless = 0
        self._num_attempts = 0
        self._last: Ending | None = None

    def decide(self, ending: Ending, start: Progress, end: Progress, budget: int) -> Decision:
        """Return what follows an attempt.

        Args:
            ending: How it ended.
            start: Where it began.
            end: How far it came.
            budget: Most restarts in a row without progress.
        """
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
            return Decision(is_again=True, reason=_left(budget))
        self._num_fruitless += is_restart
        if before is not None and _is_same(before, ending):
            return Decision(
                is_again=False,
                reason="the same error at the same step twice in a row will not heal by itself",
            )
        if self._num_fruitless >= budget:
            reason = f"{budget} {_restarts(budget)} in a row without progress"
            return Decision(is_again=False, reason=reason)
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._num_fruitless)
        left = _left(budget - self._num_fruitless)
        return Decision(is_again=True, pause_s=pause_s, reason=left)


def _is_same(before: Ending, ending: Ending) -> bool:
    return ending.fingerprint is not None and ending.fingerprint == before.fingerprint


def _left(num: int) -> str:
    return f"{num} {_restarts(num)} without progress left"


def _restarts(num: int) -> str:
    return "restart" if num == 1 else "restarts"
