"""Goodput of a supervised run: the share of its time that went into useful steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from modelzoo_trainer.tools.supervisor.outcome import Ending, Outcome
from modelzoo_trainer.tools.supervisor.protocol import UNKNOWN, SharedStatus, TimeKind, known

FORMAT_VERSION: Final = 1
KINDS = ("steps", "data", "saving", "validation", "compiling", "startup", "lost", "other", "down")
"""Useful steps, waiting for data, ...; `lost` are steps that were repeated or did not finish;
`compiling` is the time of an attempt's first batch beyond the median; `down` is the time between
two attempts; `other` is the time between stages and at the end of a run."""
_MEASURED: Final = (
    TimeKind.DATA,
    TimeKind.SAVING,
    TimeKind.VALIDATION,
    TimeKind.STARTUP,
    TimeKind.OTHER,
)


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A child that has ended: what it measured, and how it ended."""

    number: int  # from 1
    down_s: float  # since the previous attempt ended
    shared: SharedStatus
    ending: Ending

    @property
    def is_between(self) -> bool:
        """Whether the steps belong to a finished trainer and the next one has not started."""
        return self.shared.trainer < self.shared.num_done

    @property
    def progress(self) -> tuple[int, int]:
        """The number of finished trainers, and the step that the next one reached."""
        step = 0 if self.is_between else max(self.shared.step, self.shared.saved_step, 0)
        return int(self.shared.num_done), int(step)

    @property
    def start(self) -> tuple[int, int]:
        """The number of trainers finished before the last one, and the step at which it started."""
        return int(self.shared.trainer), known(self.shared.start_step) or 0

    @property
    def surviving_step(self) -> int:
        """The step that is kept unless a later attempt resumes from an older checkpoint."""
        if self.is_between or self.ending.outcome in (Outcome.DONE, Outcome.STOPPED):
            return known(self.shared.step) or 0
        saved = known(self.shared.saved_step)
        return self.start[1] if saved is None else saved

    def breakdown(self, kept_step: int) -> dict[str, float]:
        """Return seconds by the names of `KINDS`; they add up to its lifetime plus `down_s`.

        `kept_step`: the last step that was not repeated.
        """
        seconds, median_s = self.shared.seconds, self.shared.median_s
        first = seconds[TimeKind.FIRST_STEP]
        compiling = max(0.0, first - median_s) if median_s > 0 else first
        steps = seconds[TimeKind.STEPS] + first - compiling
        redone = self._redone(kept_step, steps)
        return {
            "steps": steps - redone,
            **{kind.name.lower(): seconds[kind] for kind in _MEASURED},
            "compiling": compiling,
            "lost": redone + seconds[TimeKind.CUT_OFF],
            "down": self.down_s,
        }

    def _redone(self, kept_step: int, steps: float) -> float:
        """Return the seconds of steps after the kept one."""
        shared = self.shared
        start, step = shared.start_step, shared.step
        if UNKNOWN in (start, step) or kept_step >= step:
            return 0.0
        if kept_step == shared.saved_step and kept_step > start:
            in_steps: float = shared.seconds[TimeKind.STEPS]
            return max(0.0, in_steps - max(0.0, shared.spent_at_save))
        share = (step - max(kept_step, start)) / max(1, step - start)
        return share * max(0.0, steps - max(0.0, shared.spent_at_start))

    def to_dict(self, breakdown: dict[str, float]) -> dict[str, Any]:
        """Return its entry in `ledger.json`."""
        return {
            "number": self.number,
            "trainer": int(self.shared.trainer),
            "outcome": str(self.ending.outcome),
            "cause": self.ending.cause,
            "start_step": known(self.shared.start_step),
            "step": known(self.shared.step),
            "saved_step": known(self.shared.saved_step),
            "wall_s": sum(breakdown.values()) - self.down_s,
            "seconds": {kind: breakdown[kind] for kind in KINDS},
        }


class Goodput:
    """The attempts of a run and where the time went."""

    def __init__(self, command: Sequence[str], started: str) -> None:
        self._command = list(command)
        self._started = started
        self.attempts: list[Attempt] = []

    def breakdowns(self) -> list[dict[str, float]]:
        """Return the seconds of each attempt; steps that a later attempt repeats count as lost."""
        found = []
        for idx, attempt in enumerate(self.attempts):
            kept = attempt.surviving_step
            for later in self.attempts[idx + 1 :]:
                start = known(later.shared.start_step)
                if later.shared.trainer == attempt.shared.trainer and start is not None:
                    kept = min(kept, start)
            found.append(attempt.breakdown(kept))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `ledger.json`."""
        breakdowns = self.breakdowns()
        attempts = [one.to_dict(b) for one, b in zip(self.attempts, breakdowns, strict=True)]
        totals = {kind: sum(one[kind] for one in breakdowns) for kind in KINDS}
        wall_s = sum(totals.values())
        return {
            "format_version": FORMAT_VERSION,
            "command": self._command,
            "started": self._started,
            "outcome": attempts[-1]["outcome"] if attempts else None,
            "num_restarts": max(0, len(attempts) - 1),
            "wall_s": wall_s,
            "goodput": totals["steps"] / wall_s if wall_s else 0.0,
            "seconds": totals,
            "attempts": attempts,
        }

    def summary(self) -> str:
        """Return the outcome and the shares of the time in one line."""
        report = self.to_dict()
        num = len(self.attempts)
        wall_s = report["wall_s"]
        shares = ", ".join(
            f"{kind} {100 * seconds / wall_s:.0f} %"
            for kind, seconds in report["seconds"].items()
            if wall_s and seconds / wall_s >= 0.005
        )
        attempts = "1 attempt" if num == 1 else f"{num} attempts"
        return f"{report['outcome']} after {attempts} and {wall_s:.1f} s: {shares}"
