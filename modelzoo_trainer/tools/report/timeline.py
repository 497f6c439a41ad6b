"""How a run spent its time: training, validating, saving, restarts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.base.regular_files import read_bytes
from modelzoo_trainer.tools.report.sessions import Event, LogSession, training_calls

KINDS: Final = {
    "train": "Training",
    "data": "Waiting for data",
    "validate": "Validating",
    "save": "Saving checkpoints",
    "startup": "Starting up",
    "lost": "Training lost to a restart",
    "down": "Down between restarts",
    "other": "Other",
}
"""Keys and titles, in the order of the legend."""
MAX_SPANS: Final = 600  # of one run; the shortest are not drawn


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """A period of one kind."""

    kind: str
    start: float
    end: float
    step: float | None = None

    @property
    def seconds(self) -> float:
        """The length of the span."""
        return max(0.0, self.end - self.start)


@dataclass(frozen=True, slots=True)
class Pause:
    """The time between the end of a run and its restart, or its continuation."""

    start: float
    end: float
    step: float | None
    """Where training continued; None = it did not."""


@dataclass(slots=True)
class Timeline:
    """How a run spent its time, from its first start."""

    spans: list[TimelineSpan] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    num_restarts: int = 0
    num_left_out: int = 0
    """Short spans that are not drawn, but included in the seconds."""
    seconds: dict[str, float] = field(default_factory=dict)
    source: str = "events"
    """Where it is from: "events", "metrics", or "supervisor" for the seconds."""

    @property
    def wall_s(self) -> float:
        """Total seconds."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """The share of time spent on training that was not lost; None = not known."""
        return self.seconds.get("train", 0.0) / self.wall_s if self.wall_s > 0 else None


def timeline_of(
    sessions: Sequence[LogSession], first_time: float, last_time: float, run_dir: Path
) -> Timeline:
    """Return the timeline of a run.

    `first_time`, `last_time`: of its metrics, NaN if they have none.
    """
    known = training_calls(sessions)
    found = Timeline(source="events" if known else "metrics")
    if not known and math.isfinite(first_time):
        found.spans.append(TimelineSpan("train", first_time, last_time))
    for idx, session in enumerate(known):
        later = known[idx + 1] if idx + 1 < len(known) else None
        _add_session(found, session, later, last_time)
    for kind in KINDS:
        seconds = sum(span.seconds for span in found.spans if span.kind == kind)
        if seconds > 0:
            found.seconds[kind] = seconds
    _take_ledger(found, run_dir)
    _keep_longest(found)
    return found


def _add_session(
    found: Timeline, session: LogSession, later: LogSession | None, last_metric: float
) -> None:
    start, end = session.events[0].time, session.events[-1].time
    next_start = later.events[0].time if later is not None else math.inf
    if not session.of("end") and end < last_metric < next_start:
        end = last_metric
    end = max([end, *(event.time + (event.number("seconds") or 0) for event in session.events)])
    spans = _session_spans(session, start, end)
    resumed = later.first_step if later is not None else None
    is_restart = later is not None and not session.is_finished
    if is_restart and resumed is not None:
        spans = _mark_lost(spans, session, resumed)
    found.num_restarts += is_restart
    found.spans += spans
    if later is not None and (is_restart or later.path != session.path):
        found.pauses.append(Pause(end, next_start, resumed))
    if is_restart and next_start > end:
        found.spans.append(TimelineSpan("down", end, next_start))


def _session_spans(session: LogSession, start: float, end: float) -> list[TimelineSpan]:
    """Return the spans of a session without gaps."""
    inner = [
        TimelineSpan(
            event.kind, event.time, event.time + (event.number("seconds") or 0.0), event.step
        )
        for event in session.of("validate", "save")
        if (event.number("seconds") or 0.0) > 0
    ]
    background = _background(session, start, end)
    spans: list[TimelineSpan] = []
    at = start
    for span in sorted(inner, key=lambda span: span.start):
        if span.start > at:
            spans += _cut(background, at, span.start)
        if span.end > at:
            spans.append(TimelineSpan(span.kind, max(at, span.start), span.end, span.step))
            at = span.end
    return spans + _cut(background, at, end)


def _background(session: LogSession, start: float, end: float) -> list[TimelineSpan]:
    """Return the spans between validations and checkpoints."""
    spans: list[TimelineSpan] = []
    at, kind, step = start, "startup", 0.0
    for event in session.of("train_start", "train_end"):
        spans.append(TimelineSpan(kind, at, event.time, event.step))
        at, step = event.time, event.step
        kind = "train" if event.kind == "train_start" else "other"
    if not spans:
        first = session.of("validate")
        spans.append(TimelineSpan("startup", at, first[0].time if first else end))
        at, kind = spans[0].end, "other"
    spans.append(TimelineSpan(kind, at, end, step))
    return spans


def _cut(spans: Sequence[TimelineSpan], start: float, end: float) -> list[TimelineSpan]:
    """Clip spans to an interval."""
    found = []
    for span in spans:
        low, high = max(start, span.start), min(end, span.end)
        if high > low:
            found.append(TimelineSpan(span.kind, low, high, span.step))
    return found


def _mark_lost(
    spans: list[TimelineSpan], session: LogSession, resumed: float
) -> list[TimelineSpan]:
    """Mark training after the checkpoint that the next session resumed from as lost."""
    reached = _time_of(session, resumed)
    found = []
    for span in spans:
        if span.kind != "train" or span.end <= reached:
            found.append(span)
            continue
        if span.start < reached:
            found.append(TimelineSpan("train", span.start, reached, span.step))
        found.append(TimelineSpan("lost", max(span.start, reached), span.end, span.step))
    return found


def _time_of(session: LogSession, step: float) -> float:
    """Return when a session had taken a step, according to its events."""
    before: Event | None = None
    for event in session.events:
        if event.kind == "save" and event.step == step:
            return event.time
        if event.step <= step:
            before = event
    return session.events[0].time if before is None else before.time


def _take_ledger(found: Timeline, run_dir: Path) -> None:
    """Use the seconds measured by the supervisor, if there was one."""
    ledgers = sorted((run_dir / "restarts").glob("*/ledger.json"))
    if not ledgers:
        return
    try:
        ledger = json.loads(read_bytes(ledgers[-1], inside=run_dir))
        seconds = {str(kind): float(value) for kind, value in ledger["seconds"].items()}
        num_restarts = int(ledger["num_restarts"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return
    found.source, found.num_restarts = "supervisor", num_restarts
    found.seconds = _renamed(seconds)


def _renamed(seconds: dict[str, float]) -> dict[str, Any]:
    """Return the supervisor's seconds by the keys of `KINDS`."""
    names = {
        "steps": "train",
        "data": "data",
        "saving": "save",
        "validation": "validate",
        "compiling": "startup",
        "startup": "startup",
        "lost": "lost",
        "down": "down",
    }
    found: dict[str, float] = {}
    for kind, value in seconds.items():
        name = names.get(kind, "other")
        found[name] = found.get(name, 0.0) + value
    return {name: value for name, value in found.items() if value > 0}


def _keep_longest(found: Timeline) -> None:
    if len(found.spans) <= MAX_SPANS:
        return
    longest = sorted(found.spans, key=lambda span: span.seconds)[-MAX_SPANS:]
    found.num_left_out = len(found.spans) - MAX_SPANS
    found.spans = sorted(longest, key=lambda span: span.start)
