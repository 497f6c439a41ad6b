"""The tables of the report, as HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from html import escape
from typing import Final

import numpy as np

from modelzoo_trainer.base.metric_direction import direction_of
from modelzoo_trainer.tools.checkpoints.overview import Overview, readable
from modelzoo_trainer.tools.report.data_size import with_samples_per_epoch
from modelzoo_trainer.tools.report.metric_names import is_validation, natural
from modelzoo_trainer.tools.report.metrics_file import Series
from modelzoo_trainer.tools.report.run import ReportedRun
from modelzoo_trainer.tools.report.run_log import HINT
from modelzoo_trainer.tools.report.settings import (
    SettingRow,
    compared,
    under_common_names,
    without_overridden,
)
from modelzoo_trainer.tools.report.timeline import KINDS

_MAX_METRICS: Final = 6  # in the overview
_MAX_WARNINGS: Final = 20  # of one run
_MAX_TILE_METRICS: Final = 30
_MAX_CHECKPOINTS: Final = 100  # of one run
_FEW_CHECKPOINTS: Final = 12
_RATES: Final = (
    ("avg_samples_per_sec", "samples/s"),
    ("global_samples_per_sec", "samples/s"),
    ("samples_per_sec", "samples/s"),
    ("tokens_per_sec", "tokens/s"),
)
_LONGEST_CAUSE: Final = 80  # in a table; all of it appears on hovering
EXPLAINED: Final = {
    "Restarts": "How often the run was interrupted or failed, and then resumed. Charts show each "
    "restart, and each continuation of a finished run, as a dotted line (x axis: step or epoch) or "
    "a gap (time)",
    "Wall time": "From the first start to the last event, with restarts and the time between them",
    "Goodput": "Share of the wall time spent training, without steps lost to restarts",
    "Throughput": "While training: without validation, saving checkpoints and down time",
    "Written": "According to events.jsonl; otherwise the time of its file, which a copy changes",
}
"""Texts that appear on hovering."""
_LONGEST_NAME: Final = 20  # characters of a run's name in one line
_NOT_COMPARED: Final = "The data itself and your own code are not compared."
_MISSING: Final = '<span class="missing">&ndash;</span>'


def number(value: float) -> str:
    """Format a number with five digits."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}".replace(",", "&#8239;")
    return f"{value:.5g}"


def duration(seconds: float) -> str:
    """Format a duration, such as "2 h 05 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24} d {hours % 24} h"


def run_label(runs: Sequence[ReportedRun], idx: int) -> str:
    """Return the name of a run with its color, as HTML; a long one may break."""
    name = escape(runs[idx].name)
    if len(runs[idx].name) > _LONGEST_NAME:
        name = re.sub("([/_.])", r"\1<wbr>", name)
    return f'<span class="run" data-run="{idx}"><i></i><span>{name}</span></span>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table; cells and head are HTML."""
    cells = "".join(f"<th>{cell}</th>" for cell in head)
    top = f"<thead><tr>{cells}</tr></thead>\n" if any(head) else ""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="scroll"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>\n'


# ---- overview


def overview(runs: Sequence[ReportedRun]) -> str:
    """Return state, length, speed and metrics of the runs."""
    return _tiles(runs[0]) if len(runs) == 1 else _comparison(runs)


def _state(run: ReportedRun) -> str:
    title = f' title="{escape(run.cause)}"' if run.cause else ""
    return f'<span class="state {escape(run.state)}"{title}>{escape(run.state)}</span>'


def _state_and_cause(run: ReportedRun) -> str:
    cause = run.ending
    cause = cause if len(cause) <= _LONGEST_CAUSE else f"{cause[:_LONGEST_CAUSE]} ..."
    return f"{_state(run)}<small class='why'>{escape(cause)}</small>" if cause else _state(run)


def _steps(run: ReportedRun) -> str:
    total = run.total_steps
    of = f" of {number(total)}" if total and total != run.last_step else ""
    return f"{number(run.last_step)}{of}"


def _epochs(run: ReportedRun) -> str:
    pairs = run.epochs()
    return number(math.floor(pairs[-1][1] + 1e-6)) if pairs else _MISSING


def _wall(run: ReportedRun) -> str:
    seconds = run.timeline.wall_s
    return duration(seconds) if seconds > 0 else _MISSING


def _goodput(run: ReportedRun) -> str:
    share = run.timeline.goodput
    known = share is not None and run.timeline.source != "metrics"
    return f"{100 * share:.1f} %" if share is not None and known else _MISSING


def _restarts(run: ReportedRun) -> str:
    is_known = run.timeline.source != "metrics"
    return str(run.timeline.num_restarts) if is_known else _MISSING


def _rate(run: ReportedRun) -> str:
    for name, unit in _RATES:
        series = run.metrics.series.get(name)
        if series is not None:
            return f"{number(_rounded(float(series.values[-1])))} {unit}"
    steps = run.metrics.series.get("loss")
    if steps is None or len(steps.steps) < 2:
        return _MISSING
    begin, end = float(steps.times[0]), float(steps.times[-1])
    apart = sum(
        max(0.0, min(span.end, end) - max(span.start, begin))
        for span in run.timeline.spans
        if span.kind not in ("train", "lost", "data")
    )
    seconds = end - begin - apart
    if not seconds > 0:
        return _MISSING
    return f"{number(_rounded(float(steps.steps[-1] - steps.steps[0]) / seconds))} steps/s"


def _rounded(value: float) -> float:
    return round(value, 2 - math.floor(math.log10(value))) if 0 < value < math.inf else value


_FACTS: Final[dict[str, Callable[[ReportedRun], str]]] = {
    "Steps": _steps,
    "Epochs completed": _epochs,
    "Restarts": _restarts,
    "Wall time": _wall,
    "Goodput": _goodput,
    "Throughput": _rate,
}


def _explained(title: str) -> str:
    """Return the attribute with the text that appears on hovering."""
    return f' title="{EXPLAINED[title]}"' if title in EXPLAINED else ""


def _tiles(run: ReportedRun) -> str:
    facts = [
        ("State", _state(run)),
        *[(title, cell(run)) for title, cell in _FACTS.items()],
    ]
    tiles = "".join(
        f'<div class="tile"{_explained(title)}><span>{title}</span><b>{value}</b></div>'
        for title, value in facts
        if value != _MISSING
    )
    cause = ""
    if run.cause:
        text = f"stopped {run.ending}" if run.state == "stopped" else run.cause
        cause = f'<p class="cause {escape(run.state)}">{escape(text)}</p>'
    names = _chosen([run], _MAX_TILE_METRICS)
    rows = []
    for name in names:
        series = run.metrics.series[name]
        best = _best(series, name)
        at = "" if best is None else f"step {number(best[1])}"
        rows.append(
            (
                f"<code>{escape(name)}</code>",
                number(float(series.values[-1])),
                _MISSING if best is None else number(best[0]),
                at,
            )
        )
    metrics = table(("Metric", "Last", "Best", "Best at"), rows, "numbers") if rows else ""
    return f'<div class="tiles">{tiles}</div>{cause}{metrics}'


def _chosen(runs: Sequence[ReportedRun], most: int) -> list[str]:
    """Return the metrics of the overview: first of validations, then the training loss."""
    names = {name for run in runs for name in run.metrics.series}
    chosen = [name for name in names if name == "loss" or is_validation(name)]
    if "loss" not in names:
        chosen += [name for name in names if name not in chosen and direction_of(name) == "min"]

    def order(name: str) -> tuple[bool, bool, list[tuple[int, str]]]:
        return not is_validation(name), not name.endswith("loss"), natural(name)

    return sorted(chosen, key=order)[:most]


def _best(series: Series, name: str) -> tuple[float, float] | None:
    """Return the best value of a metric and its step; None if its direction is not known."""
    kind = _direction(name)
    values = np.where(np.isfinite(series.values), series.values, np.nan)
    if kind is None or np.isnan(values).all():
        return None
    idx = int(np.nanargmin(values) if kind == "min" else np.nanargmax(values))
    return float(values[idx]), float(series.steps[idx])


def _direction(name: str) -> str | None:
    """Return "min" or "max"; None also for the loss of training, the least of which is chance."""
    return None if name == "loss" else direction_of(name)


def _comparison(runs: Sequence[ReportedRun]) -> str:
    names = _chosen(runs, _MAX_METRICS)
    head = ["Run", "State"]
    columns = [
        [run_label(runs, idx) for idx in range(len(runs))],
        [_state_and_cause(run) for run in runs],
    ]
    for name in names:
        label = f"<code>{escape(name)}</code>"
        columns.append(_metric_column(runs, name))
        if _direction(name) is None:
            head.append(f"{label}<small>last</small>")
            continue
        head += [
            f"{label}<small>last / best</small>",
            "<span>best&nbsp;at</span><small>step</small>",
        ]
        columns.append(_step_column(runs, name))
    head += [f"<span{_explained(title)}>{title}</span>" for title in _FACTS]
    columns += [[cell(run) for run in runs] for cell in _FACTS.values()]
    keep = [idx for idx, column in enumerate(columns) if any(cell != _MISSING for cell in column)]
    rows = zip(*(columns[idx] for idx in keep), strict=True)
    bold = any("<b>" in cell for column in columns for cell in column)
    hint = '<p class="hint">Bold: the best of these runs.</p>' if bold else ""
    return table([head[idx] for idx in keep], rows, "numbers") + hint


def _step_column(runs: Sequence[ReportedRun], name: str) -> list[str]:
    """Return the step of the best value of each run."""
    found = [run.metrics.series.get(name) for run in runs]
    best = [None if one is None else _best(one, name) for one in found]
    return [_MISSING if pair is None else number(pair[1]) for pair in best]


def _metric_column(runs: Sequence[ReportedRun], name: str) -> list[str]:
    """Return the last and best value of each run, with the overall best marked."""
    found = [run.metrics.series.get(name) for run in runs]
    best = [None if one is None else _best(one, name) for one in found]
    known = [pair[0] for pair in best if pair is not None]
    top = (min(known) if direction_of(name) == "min" else max(known)) if len(known) > 1 else None
    cells = []
    for series, pair in zip(found, best, strict=True):
        if series is None:
            cells.append(_MISSING)
            continue
        text = number(float(series.values[-1]))
        if pair is not None:
            shown = number(pair[0])
            text += f" / {f'<b>{shown}</b>' if pair[0] == top else shown}"
        cells.append(text)
    return cells


def notes(runs: Sequence[ReportedRun], of_page: Iterable[str]) -> str:
    """Return the notes of the page and of each run."""
    lines = [escape(note) for note in of_page]
    for idx, run in enumerate(runs):
        label = f"{run_label(runs, idx)}: " if len(runs) > 1 else ""
        lines += [f"{label}{escape(note)}" for note in run.notes]
        if len(run.cause) > _LONGEST_CAUSE and len(runs) > 1:
            lines.append(f"{label}{escape(run.state)}: {escape(run.cause)}")
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f'<ul class="notes">{items}</ul>' if items else ""


def warnings(runs: Sequence[ReportedRun]) -> str:
    """Return the hints about schedules, and the warnings and errors of the runs."""
    found = []
    for idx, run in enumerate(runs):
        label = f"{run_label(runs, idx)} " if len(runs) > 1 else ""
        shown = run.warnings[:_MAX_WARNINGS]
        for one in shown:
            often = f" <small>{one.num} times</small>" if one.num > 1 else ""
            time_of = f" <small>{escape(one.when)}</small>" if one.when else ""
            if one.folder:
                time_of += f" <small>(from validate, test or predict: {escape(one.folder)})</small>"
            found.append(
                f'<li class="{one.level.lower()}">{label}<b>{one.level.capitalize()}</b> '
                f"{escape(one.text)}{often}{time_of}</li>"
            )
        if len(run.warnings) > len(shown):
            found.append(f"<li>{label}and {len(run.warnings) - len(shown)} more in run.log</li>")
    return f'<ul class="notes warnings">{"".join(found)}</ul>' if found else ""


def hints(runs: Sequence[ReportedRun]) -> str:
    """Return the hints about schedules, each with the runs that it is for."""
    found: dict[str, list[int]] = {}
    for idx, run in enumerate(runs):
        for one in run.warnings:
            if one.level == HINT:
                found.setdefault(one.text, []).append(idx)
    lines = []
    for text, which in found.items():
        labels = " ".join(run_label(runs, idx) for idx in which) if len(runs) > 1 else ""
        lines.append(f'<p class="hint warn">{labels} {escape(text)}</p>')
    return "".join(lines)


# ---- time


def goodput(runs: Sequence[ReportedRun]) -> str:
    """Return the table of the share of each kind of time."""
    known = [idx for idx, run in enumerate(runs) if run.timeline.wall_s > 0]
    kinds = [kind for kind in KINDS if any(kind in runs[idx].timeline.seconds for idx in known)]
    rows = []
    for idx in known:
        found = runs[idx].timeline
        cells = [
            f"{duration(found.seconds[kind])} <small>{100 * found.seconds[kind] / found.wall_s:.1f}"
            f" %</small>"
            if kind in found.seconds
            else _MISSING
            for kind in kinds
        ]
        rows.append((run_label(runs, idx), _wall(runs[idx]), _restarts(runs[idx]), *cells))
    if not rows:
        return ""
    head = ("Run", "Total", "Restarts", *(KINDS[kind] for kind in kinds))
    hint = '<p class="hint">Goodput is the share of the time spent training (first percentage).</p>'
    return table(head, rows, "numbers") + (hint if "train" in kinds else "")


# ---- settings and environment


@dataclass(frozen=True, slots=True)
class Tables:
    """Facts of several runs: different, only in some, or the same."""

    differing: str
    partial: str
    same: str


def settings(runs: Sequence[ReportedRun]) -> Tables:
    """Return the settings of the runs as tables."""
    named = under_common_names([run.settings for run in runs], [run.resolved for run in runs])
    if len(runs) > 1:
        named = [
            without_overridden(one, run.overridden) for one, run in zip(named, runs, strict=True)
        ]
    known = with_samples_per_epoch(named)
    found = _compared(runs, known, "Setting")
    if sum(bool(run.settings) for run in runs) < 2:
        return found
    hint = f'<p class="hint">{_NOT_COMPARED}</p>'
    if not found.differing and not found.partial:
        hint = f'<p class="hint">No setting differs. {_NOT_COMPARED}{_other_suspects(runs)}</p>'
    return replace(found, differing=found.differing + hint)


def _other_suspects(runs: Sequence[ReportedRun]) -> str:
    """Return what else differs between runs with the same settings."""
    facts = compared([run.environment for run in runs if run.environment])
    names = [escape(row.name) for row in (*facts.differing, *facts.partial)]
    if not names:
        return ""
    return f' The <a href="#environment">environment</a> differs: {", ".join(names)}.'


def environment(runs: Sequence[ReportedRun]) -> str:
    """Return versions, devices, commands and commits of the runs."""
    found = _compared(runs, [run.environment for run in runs], "")
    return found.differing + found.partial + found.same


def _compared(
    runs: Sequence[ReportedRun], found: Sequence[Mapping[str, str]], title: str
) -> Tables:
    known = [idx for idx, one in enumerate(found) if one]
    facts = compared([found[idx] for idx in known])

    def made(rows: Sequence[SettingRow], head: Sequence[str]) -> str:
        lines = [[_named(row), *map(_cell, row.cells)] for row in rows]
        return table((title, *head), lines, "settings") if lines else ""

    labels = [run_label(runs, idx) for idx in known]
    several = "In all runs" if len(runs) > 1 else ""
    differing = ""
    if facts.differing:
        lines = [[_named(row), *_marked(row.cells)] for row in facts.differing]
        ratio = "; &times; = relative to it" if "&times;" in str(lines) else ""
        differing = table((title, *labels), lines, "settings") + (
            f'<p class="hint">Shaded: different from the first run, {labels[0]}{ratio}.</p>'
        )
    return Tables(differing, made(facts.partial, labels), made(facts.same, (several,)))


def _cell(cell: str | None) -> str:
    return _MISSING if cell is None else cell


def _marked(cells: Sequence[str | None]) -> list[str]:
    """Return cells, those that differ from the first one marked."""
    return [
        _cell(cell) if cell in (None, cells[0]) else f'<span class="differs">{cell}</span>'
        for cell in cells
    ]


def _named(row: SettingRow) -> str:
    """Return the name of a setting; its full path appears on hovering if that is longer."""
    title = f' title="{escape(row.path)}"' if row.path != row.name else ""
    name = escape(row.name).replace(".", ".<wbr>")
    return f"<code{title}>{name}</code>"


def checkpoints(runs: Sequence[ReportedRun]) -> str:
    """Return the checkpoints of the runs: step, size, path."""
    written = f"<span{_explained('Written')}>Written</span>"
    head = ("Run", "Step", "Size", written, "State", "Path")
    rows: list[tuple[str, ...]] = []
    newest: list[tuple[str, ...]] = []
    for idx, run in enumerate(runs):
        own = [_checkpoint_row(run_label(runs, idx), one) for one in run.checkpoints]
        rows += own[-_MAX_CHECKPOINTS:]
        newest += own[-1:]
    if len(rows) <= _FEW_CHECKPOINTS:
        return table(head, rows, "list") if rows else ""
    every = f"<details><summary>All {len(rows)}</summary>{table(head, rows, 'list')}</details>"
    return f'<p class="hint">The newest of each run:</p>{table(head, newest, "list")}{every}'


def _checkpoint_row(label: str, item: Overview) -> tuple[str, ...]:
    return (
        label,
        _MISSING if item.step is None else number(item.step),
        readable(item.num_bytes),
        when(item.written.timestamp()) if item.written else _MISSING,
        escape(item.verdict()),
        f"<code>{escape(str(item.path))}</code>",
    )


def when(seconds: float) -> str:
    """Format a time, in local time, with the time zone."""
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S %Z}"
