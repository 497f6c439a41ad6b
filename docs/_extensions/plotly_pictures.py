"""Pictures of plotly's figures, as the kernel of a notebook gives them."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

KIND = "application/vnd.plotly.v1+json"
"""Of an output with a figure."""
WIDTH = 900  # pixels


def picture_of(plotted: Mapping[str, Any]) -> str:
    """Return a figure with lines as a PNG in base 64: a page has no program that could draw it."""
    layout = plotted["layout"]
    figure = Figure(figsize=(WIDTH / 100, layout.get("height", 400) / 100), layout="none")
    axes: dict[str, Any] = {}
    for trace in plotted["data"]:
        number = trace.get("xaxis", "x")[1:]  # "" of the first
        if number not in axes:
            axes[number] = figure.add_axes(_place(layout, number))
            axes[number].set_yscale(layout.get(f"yaxis{number}", {}).get("type", "linear"))
            axes[number].set_xlabel(_text(layout.get(f"xaxis{number}", {})))
            axes[number].set(**_limits(layout, number))
            axes[number].grid(alpha=0.3)
        marker = "o" if "markers" in trace.get("mode", "") else ""
        color = trace.get("line", {}).get("color")
        label = trace.get("name")
        axes[number].plot(
            trace["x"], trace["y"], marker=marker, markersize=3, color=color, label=label
        )
    for one, note in zip(axes.values(), layout.get("annotations", ()), strict=False):
        one.set_title(note["text"], fontsize=10)
    if layout.get("showlegend"):
        next(iter(axes.values())).legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return b64encode(buffer.getvalue()).decode("ascii")


def _place(layout: Mapping[str, Any], number: str) -> tuple[float, float, float, float]:
    """Return left, bottom, width and height of a chart, as shares of the figure."""
    left, right = layout.get(f"xaxis{number}", {}).get("domain", (0.0, 1.0))
    bottom, top = layout.get(f"yaxis{number}", {}).get("domain", (0.0, 1.0))
    return left, bottom, right - left, top - bottom


def _limits(layout: Mapping[str, Any], number: str) -> dict[str, Any]:
    """Return the ends of the axes that were set."""
    ends = {key: layout.get(f"{key}axis{number}", {}).get("range") for key in "xy"}
    return {f"{key}lim": end for key, end in ends.items() if end is not None}


def _text(axis: Mapping[str, Any]) -> str:
    return str(axis.get("title", {}).get("text", ""))
