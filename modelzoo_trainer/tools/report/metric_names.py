"""The section, unit and direction of a metric, by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

VALIDATION: Final = re.compile(r"(?:validate|validation|valid|val|eval|test)(?:_\d+)?[/_.].+")
_LOSS: Final = re.compile(r"(?:.*[/_.])?(?:loss|perplexity|ppl|nll)(?:_epoch)?", re.IGNORECASE)
_SECTIONS: Final = (
    ("lr", re.compile(r"(?:.*[/_.-])?(?:lr|learning_rate)(?:[/_.-].*)?", re.IGNORECASE)),
    ("memory", re.compile(r".*(?:memory|_bytes$|_gib$|_mib$).*", re.IGNORECASE)),
    ("norm", re.compile(r".*(?:norm|gns|noise_scale).*", re.IGNORECASE)),
    (
        "throughput",
        re.compile(
            r".*(?:per_sec|per_s\b|_per_second|/s\b|throughput|mfu|flops|"
            r"step_time|time_per|samples_streamed).*",
            re.IGNORECASE,
        ),
    ),
)
_GRAD_NORM: Final = re.compile(r"(?:model_wise|per_layer)_grad_norm(?:/.*)?")  # of ComputeNorm
SECTIONS: Final = {
    "loss": "Losses",
    "validation": "Validation metrics",
    "lr": "Learning rates",
    "norm": "Norms",
    "throughput": "Throughput",
    "memory": "Memory",
    "other": "Other metrics",
}
"""Keys and titles, in the order of the page."""


def section_of(name: str) -> str:
    """Return the key of the section that a metric belongs to, one of `SECTIONS`."""
    if _LOSS.fullmatch(name):
        return "loss"
    if VALIDATION.fullmatch(name):
        return "validation"
    for section, pattern in _SECTIONS:
        if pattern.fullmatch(name):
            return section
    return "other"


def is_time_left(name: str) -> bool:
    """Return whether a metric is an estimate of the time left."""
    return name.rpartition("/")[2] in ("time_remaining", "loop_time_remaining")


def note_of(name: str) -> str:
    """Return what a reader must know about a metric or a family of them; "" = nothing."""
    return "before clipping" if _GRAD_NORM.fullmatch(name) else ""


def is_validation(name: str) -> bool:
    """Return whether a metric is of a validation, by its name."""
    return VALIDATION.fullmatch(name) is not None


def chart_of(name: str) -> tuple[str, str]:
    """Return the chart of a metric, and the name of its curve.

    Training and validation losses share a chart.
    """
    if section_of(name) == "loss" and is_validation(name):
        scope, _, rest = name.partition("/")
        if rest:
            return rest, scope
    return name, "train" if section_of(name) == "loss" else ""


def unit_of(name: str) -> str:
    """Return the unit of a metric for its axis; "" if it is not known."""
    last = name.rpartition("/")[2].lower()
    for ending, unit in (
        ("samples_per_sec", "samples/s"),
        ("tokens_per_sec", "tokens/s"),
        ("steps_per_sec", "steps/s"),
        ("flops_per_sec", "FLOP/s"),
        ("flops_utilization", "% of the peak rate"),
        ("time_remaining", "s"),
        ("_gib", "GiB"),
        ("_bytes", "bytes"),
    ):
        if last.endswith(ending):
            return unit
    return ""


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key for natural sorting of names with numbers."""
    parts = re.split(r"(\d{1,15})", name)
    return [(int(part), "") if idx % 2 else (-1, part) for idx, part in enumerate(parts)]


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest distinct ends of paths."""
    resolved = [path.resolve().parts for path in paths]
    most = max((len(parts) for parts in resolved), default=1)
    for num in range(1, most + 1):
        names = ["/".join(parts[-num:]) for parts in resolved]
        if len(set(names)) == len(names):
            return _without_common_end(names)
    return [str(path) for path in paths]


def _without_common_end(names: list[str]) -> list[str]:
    """Remove common last parts: `a/run` and `b/run` become `a` and `b`."""
    while len(names) > 1 and len({name.rpartition("/")[2] for name in names}) == 1:
        shorter = [name.rpartition("/")[0] for name in names]
        if not all(shorter) or len(set(shorter)) < len(shorter):
            break
        names = shorter
    return names


def families(names: Iterable[str], *, least: int = 5) -> dict[str, list[str]]:
    """Group metrics that differ only in their last part, if there are many."""
    found: dict[str, list[str]] = {}
    for name in names:
        prefix, _, last = name.rpartition("/")
        if prefix and last:
            found.setdefault(prefix, []).append(name)
    return {prefix: group for prefix, group in found.items() if len(group) >= least}
