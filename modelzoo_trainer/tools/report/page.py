"""The report: one self-contained HTML file without network requests."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer import __version__
from modelzoo_trainer.base.regular_files import read_bytes
from modelzoo_trainer.base.secrets import hide_in_text
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.report import tables
from modelzoo_trainer.tools.report.chart_data import Chart, charts_of, payload
from modelzoo_trainer.tools.report.metric_names import SECTIONS, is_time_left, note_of
from modelzoo_trainer.tools.report.run import ReportedRun
from modelzoo_trainer.tools.report.sessions import IMAGE_KINDS

MARKER: Final = '<meta name="generator" content="modelzoo-trainer report">'
"""In the head of each report: files without it are not overwritten."""
_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
)
_SCRIPTS: Final = (
    *("coinciding.js", "finding.js", "gaps.js", "looks.js", "scrolling.js", "zooming.js"),
    "page.js",  # uses the others
)
_MAX_SAMPLE_BYTES: Final = 400_000  # texts of all runs
_MAX_OPEN_ROWS: Final = 20
_MAX_IMAGE_BYTES: Final = 700_000  # images of all runs


def page(runs: Sequence[ReportedRun], *, version: str | None = None) -> str:
    """Return the report of some runs as HTML.

    `version`: the server's version of the page, which then polls for newer ones.

    Raises:
        ConfigError: If plotly is not installed.
    """
    return page_and_notes(runs, version=version)[0]


def page_and_notes(
    runs: Sequence[ReportedRun], *, version: str | None = None
) -> tuple[str, list[str]]:
    """Return the report of some runs, and its notes on missing data as lines of text.

    Raises:
        ConfigError: If plotly is not installed.
    """
    charts = charts_of(runs)
    facts, notes = payload(runs, charts)
    facts["version"] = version
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    sections = _sections(runs, charts, notes)
    links = "".join(f'<a href="#{key}">{heading}</a>' for key, heading, _ in sections)
    body = "".join(
        f'<section id="{key}"><h2>{heading}</h2>{content}</section>\n'
        for key, heading, content in sections
    )
    lines = list(notes)
    for run in runs:
        lines += [f"{run.name}: {note}" if len(runs) > 1 else note for note in run.notes]
    html = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{MARKER}
<meta http-equiv="Content-Security-Policy" content="{_policy(is_served=version is not None)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)} &middot; report</title>
<style>
{_asset("page.css")}
</style>
</head>
<body>
<header><h1>{escape(title)}</h1></header>
{_controls(runs, links)}
<main>
{body}</main>
<footer>Written {tables.when(time.time())} by modelzoo-trainer {escape(__version__)}.
</footer>
<script type="application/json" id="data">{_in_script(facts)}</script>
<script>
{plotly_js()}
</script>
<script>
{"".join(map(_asset, _SCRIPTS))}</script>
</body>
</html>
"""
    return html, lines


def _policy(*, is_served: bool) -> str:
    return _POLICY.format(connect="'self'" if is_served else "'none'")


def _asset(name: str) -> str:
    return files("modelzoo_trainer.tools.report").joinpath(name).read_text(encoding="utf-8")


@cache
def plotly_js() -> str:
    """Return the JavaScript bundle of plotly.

    Raises:
        ConfigError: If plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError(
            "a report requires plotly, which is not installed: pip install plotly (it is in "
            "the extra modelzoo-trainer[report])"
        ) from None
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _in_script(facts: dict[str, Any]) -> str:
    """Return values as JSON that is safe inside a script element."""
    text = json.dumps(facts, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _controls(runs: Sequence[ReportedRun], links: str) -> str:
    chips, names = "", ", click a name in a legend to hide its curve"
    if len(runs) > 1:
        names = (
            ", click a name to hide it, double-click to show only it; a striped line: "
            "curves that coincide"
        )
        buttons = "".join(
            f'<button class="chip" data-run="{idx}" aria-pressed="true" '
            f'title="{escape(str(run.path))}"><i></i>{escape(run.name)}</button>'
            for idx, run in enumerate(runs)
        )
        chips = f'<div id="legend" role="group" aria-label="Runs">{buttons}</div>'
    return f"""<div id="controls">
<nav>{links}</nav>
<div class="row">
<label>x axis <select id="x-axis">
<option value="step">step</option><option value="time">time</option>
<option value="epoch">epoch</option></select></label>
<label>smoothing <input id="smoothing" type="range" min="0" max="0.99" step="0.01" value="0">
<output id="smoothing-value">0</output></label>
<label><input id="log-losses" type="checkbox"> log losses</label>
<label>zoom <select id="link"><option value="section">each section together</option>
<option value="page">all charts together</option>
<option value="none">each chart alone</option></select></label>
<label>find <input id="find" type="search" placeholder="metric" size="12"></label>
<span id="none-found" role="status" hidden>no metric found</span>
<span class="help">drag in a chart to zoom, double-click to reset{names}</span>
</div>{chips}</div>"""


def _sections(
    runs: Sequence[ReportedRun], charts: Sequence[Chart], notes: Sequence[str]
) -> list[tuple[str, str, str]]:
    """Return key, heading and content of each non-empty section."""
    found = [
        ("warnings", "Hints and warnings", tables.warnings(runs)),
        ("overview", "Overview", tables.overview(runs) + tables.notes(runs, notes)),
    ]
    if len(runs) > 1:
        found.append(("configuration", "Configuration", _configuration(runs)))
    for key, heading in SECTIONS.items():
        own = [(idx, chart) for idx, chart in enumerate(charts) if chart.section == key]
        found.append((key, heading, _charts(runs, key, own)))
    found.append(("time", "Timeline", _time(runs)))
    if len(runs) == 1:
        found.append(("configuration", "Configuration", _configuration(runs)))
    found.append(("environment", "Environment", tables.environment(runs)))
    found.append(("checkpoints", "Checkpoints", tables.checkpoints(runs)))
    found.append(("samples", "Samples", _samples(runs)))
    return [(key, heading, content) for key, heading, content in found if content]


def _charts(runs: Sequence[ReportedRun], key: str, own: Sequence[tuple[int, Chart]]) -> str:
    """Return the cards of a section; estimates of the time left are collapsed."""
    cards = [_card(runs, idx, chart) for idx, chart in own if not is_time_left(chart.title)]
    rest = [_card(runs, idx, chart) for idx, chart in own if is_time_left(chart.title)]
    found = f'<div class="charts">{"".join(cards)}</div>' if cards else ""
    if rest:
        found += (
            f'<details class="more"><summary>Estimated time left ({len(rest)})</summary>'
            f'<div class="charts">{"".join(rest)}</div></details>'
        )
    return tables.hints(runs) + found if key == "lr" and found else found


def _card(runs: Sequence[ReportedRun], idx: int, chart: Chart) -> str:
    also = f"<small>({note})</small>" if (note := note_of(chart.title)) else ""
    if chart.also:
        names = ", ".join(chart.also)
        also += f'<small title="{escape(names)}">({escape(chart.identical)})</small>'
    if chart.equal:
        groups = [" = ".join(runs[one].name for one in group) for group in chart.equal]
        also += f'<small class="equal">{escape(", ".join(groups))}</small>'
    choice = ""
    if chart.members:
        options = "".join(f"<option>{escape(member)}</option>" for member in chart.members)
        choice = f'<select class="member" aria-label="which">{options}</select>'
    return (
        f'<figure class="card" data-chart="{idx}"><figcaption><code>{escape(chart.title)}</code>'
        f'{choice}{also}<span class="tools">'
        f'<button class="log" aria-pressed="false" title="Logarithmic y axis">log</button>'
        f'<button class="wide" aria-pressed="false" title="Full width">wide</button>'
        f'</span></figcaption><div class="plot"></div></figure>\n'
    )


def _time(runs: Sequence[ReportedRun]) -> str:
    shares = tables.goodput(runs)
    if not shares:
        return ""
    hints = []
    if any(run.timeline.source == "metrics" for run in runs):
        hints.append("Runs without events.jsonl have only the times of their metrics.")
    if any(run.timeline.source == "supervisor" for run in runs):
        hints.append("The shares of supervised runs were measured by the supervisor.")
    num = sum(run.timeline.num_left_out for run in runs)
    if num:
        hints.append(f"{num} short spans are not drawn; the table includes them.")
    text = f'<p class="hint">{" ".join(hints)}</p>' if hints else ""
    return f'<div class="plot" id="timeline"></div>{shares}{text}'


def _configuration(runs: Sequence[ReportedRun]) -> str:
    found = tables.settings(runs)
    if len(runs) == 1:
        return found.same and f"<details><summary>All settings</summary>{found.same}</details>"
    rest = [("Only in some runs", found.partial), ("The same in all runs", found.same)]
    return found.differing + "".join(
        f"<details{_open(title, content)}><summary>{title} ({_num_rows(content)})</summary>"
        f"{content}</details>"
        for title, content in rest
        if content
    )


def _open(title: str, content: str) -> str:
    """Return whether a table is shown at once: a short one of what some runs lack."""
    is_short = _num_rows(content) <= _MAX_OPEN_ROWS
    return " open" if title.startswith("Only") and is_short else ""


def _num_rows(content: str) -> int:
    """Return the number of rows of a table, without its head."""
    return content.count("<tr>") - content.count("<thead>")


def _samples(runs: Sequence[ReportedRun]) -> str:
    found, text_left, image_left = [], _MAX_SAMPLE_BYTES, _MAX_IMAGE_BYTES
    for idx, run in enumerate(runs):
        label = tables.run_label(runs, idx) if len(runs) > 1 else ""
        texts = [(f"{one.name}, step {one.step:g}", one.text) for one in run.metrics.texts]
        texts += [(one.title, one.text) for one in run.samples if one.text is not None]
        for title, text in texts:
            if len(text) > text_left:
                continue
            text_left -= len(text)
            found.append(_sample(label, title, f"<pre>{escape(hide_in_text(text))}</pre>"))
        for one in run.samples:
            if one.image is not None:
                source = _embedded(one.image, image_left, one.inside)
                image_left -= len(source)
                shown = f'<img alt="" src="{source}">' if source else escape(str(one.image))
                found.append(_sample(label, one.title, shown))
    return f'<div class="samples">{"".join(found)}</div>' if found else ""


def _sample(label: str, title: str, content: str) -> str:
    head = f"{label} <small>{escape(title)}</small>"
    return f'<figure class="card"><figcaption>{head}</figcaption>{content}</figure>'


def _embedded(path: Path, most: int, inside: Path | None) -> str:
    """Return an image as a data URL; "" if it is too large or cannot be read."""
    try:
        if path.stat().st_size * 4 // 3 > most:
            return ""
        content = read_bytes(path, inside=inside)
    except OSError:
        return ""
    kind = IMAGE_KINDS[path.suffix.lower()]
    return f"data:image/{kind};base64,{b64encode(content).decode('ascii')}"
