"""Curves of several runs that have the same values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from modelzoo_trainer.tools.report.metrics_file import Series


def are_equal(first: Series | None, second: Series | None) -> bool:
    """Return whether two curves have the same values at the same steps; also if both lack."""
    if first is None or second is None:
        return first is second
    return np.array_equal(first.values, second.values, equal_nan=True) and np.array_equal(
        first.steps, second.steps
    )


def equal_runs(found: Sequence[Mapping[str, Series]]) -> list[list[int]]:
    """Return groups of runs, by index, whose curves in a chart are all identical.

    `found`: the curves of each run by metric; a run without any is left out.
    """
    groups: list[list[int]] = []
    for idx, own in enumerate(found):
        if not own:
            continue
        for group in groups:
            other = found[group[0]]
            if own.keys() == other.keys() and all(
                are_equal(own[name], other[name]) for name in own
            ):
                group.append(idx)
                break
        else:
            groups.append([idx])
    return [group for group in groups if len(group) > 1]
