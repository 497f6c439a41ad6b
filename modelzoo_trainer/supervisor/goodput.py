"""Where the time of a supervised run went: measured in the child, settled here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from modelzoo_trainer.supervisor.outcome import Ending, Outcome
from modelzoo_trainer.supervisor.shared_status import Field, Kind, Page

FORMAT_VERSION: Final = 1
KINDS: Final = (
    "steps",
    "data",
    "saving",
    "validation",
    "compiling",
    "startup",
    "lost",
    "other",
    "down",
)
"""Useful steps, waiting for data, ...; `lost` are steps that had to be taken again, or were not
finished; `compiling` is what an attempt's first batch took longer than the median; `down` lies
between two attempts; `other` is the end of a run, and what lies between its stages."""

_AS_THEY_ARE: Final = {
    "data": Kind.DATA,
    "saving": Kind.SAVING,
    "validation": Kind.VALIDATION,
    "startup": Kind.STARTUP,
    "other": Kind.OTHER,
}
_STEPPING: Final = (Kind.FIRST_STEP, Kind.STEPS)


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One child: what it measured, and how it ended."""

    number: int  # from 1
    down_s: float  # between the end of the one before and its start
    num_done: int = 0  # trainers that had come to their end when it ended
    trainer: int = 0  # index of the one that the steps are of
    start_step: int | None = None  # at which the fit of that began; None = it did not come to that
    step: int | None = None
    saved_step: int | None = None  # the newest checkpoint that it committed
    seconds: dict[Kind, float] = field(default_factory=dict)  # by kind, as measured
    unfinished_s: float = 0.0  # of a step that it was in when it died
    spent_at_start: float = 0.0  # seconds of steps of the trainers before
    spent_at_save: float = 0.0  # seconds of steps when that checkpoint was made
    median_s: float | None = None  # of a batch; None = not known
    ending: Ending | None = None  # None = still running

    @classmethod
    def of(cls, number: int, down_s: float, page: Page) -> Self:
        """Return what the page of a child that has just ended says."""
        values = page.values
        kind = Kind(int(values[Field.KIND]))
        elapsed = page.switch(Kind.OTHER)
        median_s = values[Field.MEDIAN_S]
        attempt = cls(
            number=number,
            down_s=down_s,
            num_done=int(values[Field.NUM_DONE]),
            trainer=int(values[Field.TRAINER]),
            start_step=page.number(Field.START_STEP),
            step=page.number(Field.STEP),
            saved_step=page.number(Field.SAVED_STEP),
            seconds={one: page.spent(one) for one in Kind},
            spent_at_start=max(0.0, values[Field.SPENT_AT_START]),
            spent_at_save=max(0.0, values[Field.SPENT_AT_SAVE]),
            median_s=median_s if median_s > 0 else None,
        )
        if kind in _STEPPING:  # it died in a step, or was made to
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
        """The step that is kept if nobody goes on from an older checkpoint."""
        is_failure = self.ending is not None and self.ending.outcome not in (
            Outcome.DONE,
            Outcome.STOPPED,
        )
        if not is_failure or self.is_between:
            return self.step or 0
        return self.start_step or 0 if self.saved_step is None else self.saved_step

    def settled(self, kept_step: int) -> dict[str, float]:
        """Return its seconds by the names of `KINDS`; they add up to its life and `down_s`."""
        first = self.seconds[Kind.FIRST_STEP]
        compiling = first if self.median_s is None else max(0.0, first - self.median_s)
        steps = self.seconds[Kind.STEPS] + first - compiling
        redone = self._redone(kept_step, steps)
        return {
            "steps": steps - redone,
            **{name: self.seconds[kind] for name, kind in _AS_THEY_ARE.items()},
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


class Ledger:
    """The attempts of a run, and the account of them."""

    def __init__(self, command: Sequence[str], started: str) -> None:
        self._command = list(command)
        self._started = started
        self.attempts: list[Attempt] = []

    def settled(self) -> list[dict[str, float]]:
        """Return the seconds of each attempt, as later attempts leave them."""
        accounts = []
        for idx, attempt in enumerate(self.attempts):
            kept = attempt.surviving_step
            for later in self.attempts[idx + 1 :]:
                if later.trainer == attempt.trainer and later.start_step is not None:
                    kept = min(kept, later.start_step)
            accounts.append(attempt.settled(kept))
        return accounts

    def to_dict(self) -> dict[str, Any]:
        """Return what is written as `ledger.json`."""
        accounts = self.settled()
        totals = {kind: sum(account[kind] for account in accounts) for kind in KINDS}
        wall_s = sum(totals.values())
        ending = self.attempts[-1].ending if self.attempts else None
        return {
            "format_version": FORMAT_VERSION,
            "command": self._command,
            "started": self._started,
            "outcome": None if ending is None else str(ending.outcome),
            "num_restarts": max(0, len(self.attempts) - 1),
            "wall_s": wall_s,
            "goodput": totals["steps"] / wall_s if wall_s else 0.0,
            "seconds": totals,
            "attempts": [
                _described(attempt, account)
                for attempt, account in zip(self.attempts, accounts, strict=True)
            ],
        }

    def summary(self) -> str:
        """Return the account in one line."""
        told = self.to_dict()
        num = len(self.attempts)
        wall_s = told["wall_s"]
        shares = ", ".join(
            f"{kind} {100 * seconds / wall_s:.0f} %"
            for kind, seconds in told["seconds"].items()
            if wall_s and seconds / wall_s >= 0.005
        )
        attempts = "1 attempt" if num == 1 else f"{num} attempts"
        return f"{told['outcome']} after {attempts} and {wall_s:.1f} s: {shares}"


def _described(attempt: Attempt, account: dict[str, float]) -> dict[str, Any]:
    ending = attempt.ending
    return {
        "number": attempt.number,
        "trainer": attempt.trainer,
        "outcome": None if ending is None else str(ending.outcome),
        "cause": None if ending is None else ending.cause,
        "start_step": attempt.start_step,
        "step": attempt.step,
        "saved_step": attempt.saved_step,
        "wall_s": sum(account.values()) - attempt.down_s,
        "seconds": {kind: account[kind] for kind in KINDS},
    }
