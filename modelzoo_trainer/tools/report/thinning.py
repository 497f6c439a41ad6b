"""Reduce the points of a curve to the minimum and maximum of each bucket."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

MAX_NON_FINITE: Final = 100  # marks in one curve


@dataclass(frozen=True, slots=True)
class Thinned:
    """The points of a curve to draw."""

    kept: Indices
    """Finite values: all, or the extremes of each bucket."""
    centers: Indices
    """The middle of each bucket; empty if nothing was thinned."""
    means: Floats
    """The mean of each bucket, for smoothing."""
    non_finite: Indices
    """NaN and infinite values, also thinned."""
    num_non_finite: int


def thin(values: Floats, max_points: int) -> Thinned:
    """Choose at most `max_points` of the finite values, and some of the others.

    Keeps the first and the last point, and the minimum and maximum of each bucket.
    `max_points`: at least 4.
    """
    is_finite = np.isfinite(values)
    finite = np.flatnonzero(is_finite)
    others = np.flatnonzero(~is_finite)
    marks = others
    if len(others) > MAX_NON_FINITE:
        marks = others[np.linspace(0, len(others) - 1, MAX_NON_FINITE).astype(np.int64)]
    if len(finite) <= max_points:
        nothing = np.empty(0, dtype=np.int64)
        return Thinned(finite, nothing, np.empty(0), marks, len(others))
    num_buckets = max(1, (max_points - 2) // 2)
    edges = np.linspace(0, len(finite), num_buckets + 1).astype(np.int64)
    drawn = values[finite]
    extremes = _extremes(drawn, edges)
    kept = np.unique(np.concatenate(([0], extremes, [len(finite) - 1])))
    means = np.add.reduceat(drawn, edges[:-1]) / np.diff(edges)
    centers = (edges[:-1] + edges[1:] - 1) // 2
    return Thinned(finite[kept], finite[centers], means, marks, len(others))


def _extremes(values: Floats, edges: Indices) -> Indices:
    """Return the indices of the minimum and maximum of each bucket."""
    found = np.empty(2 * (len(edges) - 1), dtype=np.int64)
    for idx, (start, end) in enumerate(pairwise(edges)):
        bucket = values[start:end]
        found[2 * idx] = start + bucket.argmin()
        found[2 * idx + 1] = start + bucket.argmax()
    return found
