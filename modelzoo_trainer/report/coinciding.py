"""Curves of several runs that have the same values, or cover each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from modelzoo_trainer.report.metrics_file import Series

_CLOSE: Final = 0.005  # of the range of values: less is not seen
_SHARE: Final = 0.25  # of the common steps


def are_equal(first: Series | None, second: Series | None) -> bool:
    """Return whether two curves have the same values at the same steps; also if both lack."""
    if first is None or second is None:
        return first is second
    return np.array_equal(first.values, second.values, equal_nan=True) and np.array_equal(
        first.steps, second.steps
    )


def cover_each_other(first: Series, second: Series) -> bool:
    """Return whether a large part of one curve cannot be told from the other in a chart."""
    _, here, there = np.intersect1d(first.steps, second.steps, return_indices=True)
    if not len(here):
        return False
    one, other = first.values[here], second.values[there]
    finite = np.isfinite(one) & np.isfinite(other)
    if not finite.any():
        return False
    one, other = one[finite], other[finite]
    both = np.concatenate((one, other))
    apart = np.abs(one - other) > _CLOSE * float(both.max() - both.min())
    return float(np.mean(~apart)) >= _SHARE


def equal_runs(names: Sequence[str], found: Sequence[Mapping[str, Series]]) -> list[str]:
    """Return the runs whose curves in a chart are all identical, such as "a = b".

    `names`: of the runs. `found`: the curves of each run by metric; without any, it is left out.
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
    return [" = ".join(names[idx] for idx in group) for group in groups if len(group) > 1]
