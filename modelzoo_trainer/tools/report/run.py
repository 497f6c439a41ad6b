"""One run, read from its folder."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Final

import numpy as np

from modelzoo_trainer.base.regular_files import read_bytes
from modelzoo_trainer.base.secrets import hide_in_text
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.checkpoints.overview import Overview, find_checkpoints
from modelzoo_trainer.tools.report.metrics_file import STEP_KEYS, MetricsFile, Series, read_metrics
from modelzoo_trainer.tools.report.run_log import HINT, LoggedMessage
from modelzoo_trainer.tools.report.sessions import (
    Event,
    LogSession,
    Sample,
    fits_or_all,
    of_this_run,
    read_sessions,
    samples_of,
    training_calls,
)
from modelzoo_trainer.tools.report.timeline import Timeline, timeline_of

METRICS: Final = "metrics.jsonl"
FRESH_S: Final = 600.0
"""A run on another host counts as running if its files are newer than this."""
_MAX_NAMED: Final = 20  # runs in a message
_MEMORY: Final = "_bytes"
_GIB: Final = 2.0**30


@dataclass(slots=True)
class ReportedRun:
    """The data of one run for the report."""

    path: Path
    name: str
    metrics: MetricsFile
    sessions: list[LogSession] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)
    checkpoints: list[Overview] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    resolved: dict[str, str] = field(default_factory=dict)
    """The settings named as in Python; the same ones for a run from Python."""
    overridden: list[str] = field(default_factory=list)
    """Paths of settings that have no effect, because a schedule replaces their values."""
    environment: dict[str, str] = field(default_factory=dict)
    state: str = "unknown"
    """finished, running, stopped, failed, died or unknown."""
    cause: str = ""
    notes: list[str] = field(default_factory=list)
    warnings: list[LoggedMessage] = field(default_factory=list)
    """Hints about the schedules, then warnings and errors of `run.log`, of evaluations last."""

    @property
    def ending(self) -> str:
        """The cause in words, after the state; "" = not known."""
        return f"by {self.cause}" if self.cause and self.state == "stopped" else self.cause

    @property
    def start(self) -> float:
        """The start of the run, in seconds since 1970; NaN = not known."""
        spans = self.timeline.spans
        return spans[0].start if spans else self.metrics.first_time

    @property
    def last_step(self) -> float:
        """The last known step."""
        return max([self.metrics.last_step, *(event.step for event in self._events())])

    @property
    def total_steps(self) -> float | None:
        """The planned number of steps; None = not known."""
        return self._newest("total_steps")

    def _events(self) -> Iterable[Event]:
        return (event for session in self.sessions for event in session.events)

    def _newest(self, key: str) -> float | None:
        found = [value for event in self._events() if (value := event.number(key)) is not None]
        return found[-1] if found else None

    def epochs(self) -> list[tuple[float, float]]:
        """Return pairs of a step and the completed epochs; empty = not known."""
        own = self.metrics.series.get("epoch")
        if own is not None:
            idx = np.unique(np.linspace(0, len(own.steps) - 1, 500).astype(np.int64))
            return list(zip(own.steps[idx].tolist(), own.values[idx].tolist(), strict=True))
        found = {0.0: 0.0}
        for event in self._events():
            epoch = event.number("epoch")
            if event.kind == "epoch" and epoch is not None:
                found[event.step] = epoch
        per_epoch, last = self._newest("steps_per_epoch"), max(found)
        if per_epoch and self.last_step > last:
            found[self.last_step] = found[last] + (self.last_step - last) / per_epoch
        return sorted(found.items()) if len(found) > 1 else []


def read_run(path: Path, name: str) -> ReportedRun:
    """Read a run.

    `path`: its folder, or a metrics file.

    Raises:
        ConfigError: If it is not a run, or its metrics cannot be read.
    """
    run_dir, file = (path.parent, path) if path.is_file() else (path, path / METRICS)
    inside = None if path.is_file() else run_dir
    is_alone = path.is_file() and path.name != METRICS
    sessions = [] if is_alone else read_sessions(run_dir)
    if not file.exists():
        _refuse_without_metrics(path, sessions)
    try:
        metrics = read_metrics(file, inside=inside) if file.exists() else MetricsFile()
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error.strerror or error}.") from None
    if path.is_file() and metrics.is_unusable:
        raise ConfigError(
            f"{str(path)!r} is not a file of metrics: none of its {metrics.num_lines} lines is a "
            f"JSON object with a step ({', '.join(STEP_KEYS)}). Pass a {METRICS}, or the model_dir "
            f"of a run."
        )
    run = ReportedRun(path, name, metrics, of_this_run(sessions))
    metrics.series |= _memory(run.sessions)
    first, last = metrics.first_time, metrics.last_time
    run.timeline = timeline_of(run.sessions, first, last, run_dir)
    if not is_alone:
        run.checkpoints = _checkpoints(run_dir, sessions)
        run.samples = [one for session in run.sessions for one in samples_of(session)]
    _take_settings(run)
    run.state, run.cause = _state(run, run_dir, file)
    run.notes = _notes(run, run_dir, file)
    run.warnings = _warnings(run.sessions)
    return run


def _refuse_without_metrics(path: Path, sessions: list[LogSession]) -> None:
    """Check that a folder without metrics belongs to a run that has just started.

    Raises:
        ConfigError: If it does not.
    """
    if not path.exists():
        raise ConfigError(f"{str(path)!r} does not exist. Pass the model_dir of a run.")
    if any(session.events for session in sessions) or _is_alive(path, path / METRICS):
        return
    if (path / "logs").is_dir() or any(path.glob("checkpoint_*")):
        raise ConfigError(
            f"{str(path)!r} is a run without {METRICS}: it was trained without a JsonlLogger. Add "
            f"one (in Python: Trainer(loggers=[JsonlLogger()])), and train again."
        )
    inside = _runs_inside(path)
    if inside:
        names = " ".join(shlex.quote(str(one)) for one in inside[:_MAX_NAMED])
        more = f"\n(and {len(inside) - _MAX_NAMED} more)" if len(inside) > _MAX_NAMED else ""
        raise ConfigError(
            f"{str(path)!r} is not the folder of a run, but contains run folders. Pass them:\n"
            f"  modelzoo-trainer report {names}{more}"
        )
    raise ConfigError(
        f"{str(path)!r} is not the folder of a run: it has no {METRICS}. Pass the model_dir of a "
        f"run with a JsonlLogger, or a metrics file with one JSON object per line."
    )


def _runs_inside(path: Path) -> list[Path]:
    """Return the folders in a folder that are runs."""
    try:
        return sorted(one for one in path.iterdir() if (one / METRICS).is_file())
    except OSError:
        return []


def _memory(sessions: Iterable[LogSession]) -> dict[str, Series]:
    """Return the memory recorded in events, in GiB."""
    points: dict[str, dict[float, tuple[float, float]]] = {}
    for session in sessions:
        for event in session.of("memory"):
            for key in event.facts:
                value = event.number(key)
                if key.endswith(_MEMORY) and value is not None:
                    name = f"memory/{key.removesuffix(_MEMORY)}_gib"
                    points.setdefault(name, {})[event.step] = (event.time, value / _GIB)
    found = {}
    for name, by_step in points.items():
        steps = np.array(sorted(by_step))
        times, values = np.array([by_step[step] for step in steps]).T
        found[name] = Series(steps, times, values)
    return found


def _checkpoints(run_dir: Path, sessions: Iterable[LogSession]) -> list[Overview]:
    """Return the checkpoints of a run; the times of their files may come from a copy."""
    saved: dict[tuple[str, float | None], float] = {}
    for session in sessions:
        for event in session.of("save"):
            end = event.time + (event.number("seconds") or 0.0)
            saved[str(event.facts.get("name")), event.step] = end
    try:
        found = [item for item in find_checkpoints(run_dir) if not item.is_leftover]
    except OSError:
        return []
    return [
        item if end is None else replace(item, written=_local(end) or item.written)
        for item in found
        for end in [saved.get((item.path.name, item.step))]
    ]


def _local(seconds: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds).astimezone()
    except (ValueError, OverflowError, OSError):
        return None


def _take_settings(run: ReportedRun) -> None:
    """Take the newest settings and environment of a fit; a later validation has its own."""
    sizes: dict[str, str] = {}
    for session in fits_or_all(run.sessions):
        run.settings = session.settings or run.settings
        if session.resolved:
            run.resolved, run.overridden = session.resolved, session.overridden
        run.environment = session.environment or run.environment
        sizes = session.sizes or sizes
    run.settings, run.resolved = run.settings | sizes, run.resolved | sizes


# ---- state


def _state(run: ReportedRun, run_dir: Path, file: Path) -> tuple[str, str]:
    """Return the state of a run, and why it ended if known."""
    known = training_calls(run.sessions)
    marks = known[-1].of("start", "end") if known else []
    if marks and marks[-1].kind == "end":
        facts = marks[-1].facts
        outcome, cause = str(facts.get("outcome", "unknown")), facts.get("cause")
        stopped = facts.get("stopped_by") or _stopped_by(run.sessions, known[-1])
        if outcome == "finished" and stopped:  # such as early stopping
            outcome = "stopped"
        return outcome, hide_in_text(str(cause or stopped or ""))
    if _is_alive(run_dir, file):
        return "running", ""
    if known:
        return "died", "the process ended without closing the run; it may have been killed"
    if (run_dir / ".finished.json").is_file() and run.checkpoints:
        return "finished", ""
    return "unknown", ""


def _stopped_by(sessions: Iterable[LogSession], call: LogSession) -> str:
    """Return what stopped a call, according to `run.log`, for runs of earlier versions."""
    found = [session.stopped_by for session in sessions if session.path == call.path]
    return found[-1] if found else ""


def _is_alive(run_dir: Path, file: Path) -> bool:
    """Return whether the process of a run seems to be running."""
    try:
        holder = json.loads(read_bytes(run_dir / ".lock", inside=run_dir))
        host, pid = holder["host"], int(holder["pid"])
        if host != platform.node():
            return time.time() - file.stat().st_mtime < FRESH_S
        os.kill(pid, 0)
    except PermissionError:  # a process of another user
        return True
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return False
    return True


# ---- notes


def _warnings(sessions: Sequence[LogSession]) -> list[LoggedMessage]:
    """Return the hints of the newest session that trained, and what was logged.

    What was logged by evaluations comes last, with the folder of the logs.
    """
    trained = [session for session in sessions if session.of("train_start")]
    hints = trained[-1].hints if trained else []
    found = [LoggedMessage(HINT, hint) for hint in hints]
    fits = fits_or_all(sessions)
    for session in fits:
        found += [one for one in session.warnings if one.text not in hints]
    known, paths = {one.text for one in found}, {session.path for session in fits}
    for session in sessions:
        if session.path not in paths:
            folder = f"{session.path.parent.name}/{session.path.name}"
            new = [one for one in session.warnings if one.text not in known]
            found += [replace(one, folder=folder) for one in new]
    return found


def _notes(run: ReportedRun, run_dir: Path, file: Path) -> list[str]:
    """Return notes on missing data."""
    found = _notes_on_metrics(run.metrics, file.name)
    if not run.metrics.num_lines:
        what = "is empty" if file.exists() else "is missing"
        found.append(
            f"No metrics yet: {file.name} {what}."
            if run.state == "running"
            else f"No metrics: {file.name} {what}. Metrics require a JsonlLogger in the run."
        )
    num_broken = sum(session.num_broken for session in run.sessions)
    if num_broken:
        found.append(f"Skipped {num_broken} unreadable lines of events.jsonl.")
    found += [
        f"{session.path.name}/{problem}."
        for session in run.sessions
        for problem in session.problems
    ]
    earlier = sorted(path.name for path in run_dir.glob("metrics-*.jsonl"))
    if earlier and file.name == METRICS:
        found.append(
            f"Metrics of earlier runs in this folder: {', '.join(earlier)}. Pass such a file "
            f"instead of the folder to see them."
        )
    return found


def _notes_on_metrics(metrics: MetricsFile, name: str) -> list[str]:
    found = []
    if metrics.num_lines > metrics.num_broken + metrics.is_cut and math.isnan(metrics.first_time):
        found.append("The metrics have no times; the time axis does not show this run.")
    if metrics.num_broken:
        found.append(
            f"Skipped {metrics.num_broken} of {metrics.num_lines} lines of {name} (not a JSON "
            f"object, or without a step)."
        )
    if metrics.is_cut:
        found.append(f"Skipped the incomplete last line of {name}.")
    if metrics.num_repeated:
        found.append(
            f"{metrics.num_repeated} values were logged again for the same step; showing the later "
            f"ones."
        )
    if metrics.left_out:
        names = sorted(metrics.left_out)
        rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
        found.append(f"Not drawn, because they are not numbers: {', '.join(names[:5])}{rest}.")
    return found
