"""The data of the charts: curves, thinned and packed, by chart and section."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from modelzoo_trainer.tools.report.coinciding import are_equal, equal_runs
from modelzoo_trainer.tools.report.metric_names import (
    SECTIONS,
    chart_of,
    families,
    is_validation,
    natural,
    section_of,
    unit_of,
)
from modelzoo_trainer.tools.report.metrics_file import Series
from modelzoo_trainer.tools.report.run import ReportedRun
from modelzoo_trainer.tools.report.thinning import Indices, thin
from modelzoo_trainer.tools.report.timeline import KINDS

MAX_POINTS: Final = 130_000
"""Of all curves; about 24 bytes each in the file."""
MAX_POINTS_OF_CURVE: Final = 2000
MIN_POINTS_OF_CURVE: Final = 64
MAX_CURVES: Final = MAX_POINTS // MIN_POINTS_OF_CURVE
_MAX_PAUSES: Final = 200  # of one run
_MAX_LINES: Final = 12  # of a chart with a line for each member of a family


@dataclass(slots=True)
class Chart:
    """One chart: the curves of one or several related metrics."""

    title: str
    section: str
    unit: str = ""
    members: list[str] = field(default_factory=list)
    """Choices of a menu; empty = all curves are drawn."""
    curves: list[tuple[int, str, str, str]] = field(default_factory=list)
    """Index of the run, metric, name of the curve, member."""
    also: list[str] = field(default_factory=list)
    """Metrics with the same values."""
    identical: str = ""
    """What has the same values, in words."""
    equal: list[list[int]] = field(default_factory=list)
    """Groups of runs, by index, with the same values at the same steps."""


def charts_of(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Return the charts of some runs, in the order of the page."""
    names = sorted({name for run in runs for name in run.metrics.series}, key=natural)
    names = [name for name in names if name != "epoch"]
    same = _same(runs, names)
    names = [name for name in names if name not in same]
    found: dict[str, Chart] = {}
    grouped = families([name for name in names if section_of(name) != "loss"], least=3)
    family_of = {name: prefix for prefix, group in grouped.items() for name in group}
    for name in names:
        prefix = family_of.get(name)
        title, variant = (prefix, "") if prefix is not None else chart_of(name)
        chart = found.setdefault(title, Chart(title, section_of(name), unit_of(name)))
        member = "" if prefix is None else name.removeprefix(f"{prefix}/")
        if prefix is not None and len(runs) == 1 and len(grouped[prefix]) <= _MAX_LINES:
            variant, member = member, ""
        elif prefix is not None:
            chart.members.append(member)
        chart.curves += [
            (idx, name, variant, member)
            for idx, run in enumerate(runs)
            if name in run.metrics.series
        ]
        chart.also += [other for other, kept in same.items() if kept == name]
    for chart in found.values():
        if chart.also:
            _name_identical(chart, names)
        if len(runs) > 1:
            _note_equal(chart, runs)
    order = list(SECTIONS)
    return sorted(found.values(), key=lambda one: (order.index(one.section), _rank(one)))


def _rank(chart: Chart) -> tuple[bool, list[tuple[int, str]]]:
    return chart.title != "loss", natural(chart.title)


def _same(runs: Sequence[ReportedRun], names: Iterable[str]) -> dict[str, str]:
    """Return metrics with the values of another one, such as equal rates of several groups."""
    found: dict[str, str] = {}
    kept: dict[str, list[str]] = {}
    for name in names:
        prefix = name.rpartition("/")[0]
        if section_of(name) != "lr" or not prefix:
            continue
        for other in kept.setdefault(prefix, []):
            if all(
                are_equal(run.metrics.series.get(name), run.metrics.series.get(other))
                for run in runs
            ):
                found[name] = other
                break
        else:
            kept[prefix].append(name)
    return found


def _name_identical(chart: Chart, names: Sequence[str]) -> None:
    """Say which learning rates a chart stands for; `names`: all that are drawn."""
    every = sorted([chart.title, *chart.also], key=natural)
    prefix = chart.title.rpartition("/")[0]
    groups = [name.rpartition("/")[2] for name in every]
    kind = "parameter groups " if all(map(str.isdecimal, groups)) else ""
    listed = f"{', '.join(groups[:-1])} and {groups[-1]}"
    if len(groups) > _MAX_LINES:
        listed = f"{groups[0]} to {groups[-1]}"
    chart.identical = f"{kind}{listed} are identical"
    if not any(name != chart.title and name.startswith(f"{prefix}/") for name in names):
        chart.title = prefix


def _note_equal(chart: Chart, runs: Sequence[ReportedRun]) -> None:
    own: list[dict[str, Series]] = [{} for _ in runs]
    for idx, name, _, _ in chart.curves:
        own[idx][name] = runs[idx].metrics.series[name]
    chart.equal = equal_runs(own)


def payload(
    runs: Sequence[ReportedRun], charts: Sequence[Chart]
) -> tuple[dict[str, Any], list[str]]:
    """Return the page's data as plain values, and notes on omissions."""
    notes: list[str] = []
    num = sum(len(chart.curves) for chart in charts)
    if num > MAX_CURVES:
        notes.append(
            f"Only the first {MAX_CURVES} of {num} curves are drawn. Pass fewer runs to see more."
        )
    max_points = max(MIN_POINTS_OF_CURVE, min(MAX_POINTS_OF_CURVE, MAX_POINTS // max(1, num)))
    left, is_thinned, drawn = MAX_CURVES, False, []
    for chart in charts:
        curves = []
        for idx, name, variant, member in chart.curves[:left]:
            run = runs[idx]
            curve = _curve(run.metrics.series[name], _start_of(run), max_points)
            is_thinned = is_thinned or "mean" in curve
            curve |= {"run": idx, "variant": variant, "member": member}
            curve["smooth"] = not is_validation(name)
            curves.append(curve)
        left -= len(curves)
        drawn.append(
            {
                "title": chart.title,
                "section": chart.section,
                "unit": chart.unit,
                "members": chart.members,
                "equal": chart.equal,
                "curves": curves,
            }
        )
    if is_thinned:
        notes.append(
            f"Curves with more than {max_points} points are thinned to the minimum and maximum of "
            f"each interval, so that spikes stay visible."
        )
    facts = {
        "runs": [
            {"name": run.name, "epochs": _epochs(run), "pauses": _pauses(run)} for run in runs
        ],
        "charts": drawn,
        "timeline": _timeline(runs),
        "kinds": KINDS,
    }
    return facts, notes


def _start_of(run: ReportedRun) -> float:
    return run.start if np.isfinite(run.start) else 0.0


def _epochs(run: ReportedRun) -> list[list[float]]:
    pairs = run.epochs()
    return [[pair[0] for pair in pairs], [pair[1] for pair in pairs]]


def _pauses(run: ReportedRun) -> list[list[float | None]]:
    """Return start, end and the step of the restart of each of the newest pauses."""
    return [
        [round(one.start - run.start, 3), round(one.end - run.start, 3), one.step]
        for one in run.timeline.pauses[-_MAX_PAUSES:]
    ]


def _curve(series: Series, start: float, max_points: int) -> dict[str, Any]:
    thinned = thin(series.values, max_points)
    found: dict[str, Any] = {
        "n": len(series.values),
        **_points(series, thinned.kept, start),
        "value": _packed(series.values[thinned.kept], "<f4"),
    }
    if len(thinned.centers):
        found["mean"] = {
            **_points(series, thinned.centers, start),
            "value": _packed(thinned.means, "<f4"),
        }
    if len(thinned.non_finite):
        found["bad"] = {
            **_points(series, thinned.non_finite, start),
            "n": thinned.num_non_finite,
            "kind": [str(value) for value in series.values[thinned.non_finite].tolist()],
        }
    return found


def _points(series: Series, idx: Indices, start: float) -> dict[str, Any]:
    steps = series.steps[idx]
    is_small = bool(len(steps) and np.all(steps == np.trunc(steps)) and np.abs(steps).max() < 2**31)
    times = series.times[idx] - start
    found: dict[str, Any] = {"step": _packed(steps, "<i4" if is_small else "<f8")}
    if len(times) and not np.isnan(times).all():
        found["time"] = _packed(times, "<f4")
    return found


def _packed(values: NDArray[Any], kind: str) -> list[str]:
    """Return the type of an array and its bytes in base64."""
    with np.errstate(over="ignore"):  # values too large for float32 become infinite
        packed = values.astype(kind)
    return [kind[1:], b64encode(packed.tobytes()).decode("ascii")]


def _timeline(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Return the spans of each run, by kind: start, length and step."""
    found = []
    for run in runs:
        kinds: dict[str, list[list[float | None]]] = {}
        for span in run.timeline.spans:
            row = [round(span.start - run.start, 3), round(span.seconds, 3), span.step]
            kinds.setdefault(span.kind, []).append(row)
        found.append(kinds)
    return found
