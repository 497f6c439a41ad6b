"""Goodput of a supervised run: the share of its time that went into useful steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from modelzoo_trainer.supervisor.outcome import Ending, Outcome
from modelzoo_trainer.supervisor.shared_status import Kind, SharedStatus, known

FORMAT_VERSION: Final = 1
KINDS = ("steps", "data", "saving", "validation", "compiling", "startup", "lost", "other", "down")
"""Useful steps, waiting for data, ...; `lost` are steps that were repeated or did not finish;
`compiling` is the time that an attempt's first batch took beyond the median; `down` lies between
two attempts; `other` is the end of a run, and what lies between its stages."""
_MEASURED: Final = (Kind.DATA, Kind.SAVING, Kind.VALIDATION, Kind.STARTUP, Kind.OTHER)


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One child: what it measured, and how it ended."""

    number: int  # from 1
    down_s: float  # between the end of the one before and its start
    num_done: int = 0  # trainers that had finished when it ended
    trainer: int = 0  # index of the one that the steps are of
    start_step: int | None = None  # of that one's fit; None = it did not begin
    step: int | None = None
    saved_step: int | None = None  # the newest checkpoint that it committed
    seconds: dict[Kind, float] = field(default_factory=dict)  # by kind, as measured
    unfinished_s: float = 0.0  # of the step in which it died
    spent_at_start: float = 0.0  # seconds of steps of the trainers before
    spent_at_save: float = 0.0  # seconds of steps when that checkpoint was made
    median_s: float | None = None  # of a batch; None = not known
    ending: Ending | None = None  # None = still running

    @classmethod
    def of(cls, number: int, down_s: float, shared: SharedStatus) -> Self:
        """Return what is known of a child that has just ended."""
        kind = Kind(int(shared.kind))
        elapsed = shared.switch(Kind.OTHER)
        attempt = cls(
            number=number,
            down_s=down_s,
            num_done=int(shared.num_done),
            trainer=int(shared.trainer),
            start_step=known(shared.start_step),
            step=known(shared.step),
            saved_step=known(shared.saved_step),
            seconds={one: shared.spent(one) for one in Kind},
            spent_at_start=max(0.0, shared.spent_at_start),
            spent_at_save=max(0.0, shared.spent_at_save),
            median_s=shared.median_s if shared.median_s > 0 else None,
        )
        if kind in (Kind.FIRST_STEP, Kind.STEPS):
            attempt.seconds[kind] -= elapsed
            attempt.unfinished_s = elapsed
        return attempt

    @property
    def is_between(self) -> bool:
        """Whether the steps are of a trainer that is done, and the next has not begun."""
        return self.trainer < self.num_done

    @property
    def progress(self) -> tuple[int, int]:
        """The trainers that are done, and how far the next came."""
        step = 0 if self.is_between else max(self.step or 0, self.saved_step or 0)
        return self.num_done, step

    @property
    def start(self) -> tuple[int, int]:
        """The trainers that were done when the last one began, and where its fit began."""
        return self.trainer, self.start_step or 0

    @property
    def surviving_step(self) -> int:
        """The step that is kept unless a later attempt resumes from an older checkpoint."""
        kept = (None, Outcome.DONE, Outcome.STOPPED)
        if self.is_between or (self.ending and self.ending.outcome) in kept:
            return self.step or 0
        return self.start_step or 0 if self.saved_step is None else self.saved_step

    def breakdown(self, kept_step: int) -> dict[str, float]:
        """Return its seconds by the names of `KINDS`; they add up to its life and `down_s`.

        `kept_step`: the last step that was not repeated.
        """
        first = self.seconds[Kind.FIRST_STEP]
        compiling = first if self.median_s is None else max(0.0, first - self.median_s)
        steps = self.seconds[Kind.STEPS] + first - compiling
        redone = self._redone(kept_step, steps)
        return {
            "steps": steps - redone,
            **{kind.name.lower(): self.seconds[kind] for kind in _MEASURED},
            "compiling": compiling,
            "lost": redone + self.unfinished_s,
            "down": self.down_s,
        }

    def _redone(self, kept_step: int, steps: float) -> float:
        """Return the seconds of steps after the one that was kept."""
        if self.start_step is None or self.step is None or kept_step >= self.step:
            return 0.0
        if kept_step == self.saved_step and kept_step > self.start_step:
            return max(0.0, self.seconds[Kind.STEPS] - self.spent_at_save)
        over = self.step - max(kept_step, self.start_step)
        share = over / max(1, self.step - self.start_step)
        return share * max(0.0, steps - self.spent_at_start)

    def to_dict(self, breakdown: dict[str, float]) -> dict[str, Any]:
        """Return its entry in `ledger.json`."""
        ending = self.ending
        return {
            "number": self.number,
            "trainer": self.trainer,
            "outcome": None if ending is None else str(ending.outcome),
            "cause": None if ending is None else ending.cause,
            "start_step": self.start_step,
            "step": self.step,
            "saved_step": self.saved_step,
            "wall_s": sum(breakdown.values()) - self.down_s,
            "seconds": {kind: breakdown[kind] for kind in KINDS},
        }


class Goodput:
    """The attempts of a run, and where its time went."""

    def __init__(self, command: Sequence[str], started: str) -> None:
        self._command = list(command)
        self._started = started
        self.attempts: list[Attempt] = []

    def breakdowns(self) -> list[dict[str, float]]:
        """Return the seconds of each attempt; those of steps that a later one repeats are lost."""
        found = []
        for idx, attempt in enumerate(self.attempts):
            kept = attempt.surviving_step
            for later in self.attempts[idx + 1 :]:
                if later.trainer == attempt.trainer and later.start_step is not None:
                    kept = min(kept, later.start_step)
            found.append(attempt.breakdown(kept))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return what is written as `ledger.json`."""
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
