"""Which curves are the same, and which cover each other."""

import numpy as np
import pytest

from modelzoo_trainer.report.coinciding import are_equal, cover_each_other, equal_runs
from modelzoo_trainer.report.metrics_file import Series


def series(values, first=1):
    steps = np.arange(first, first + len(values), dtype=float)
    return Series(steps, steps, np.array(values, dtype=float))


@pytest.mark.parametrize(
    ("other", "same", "covers"),
    [
        ([1, 2, 3, 4], True, True),
        ([1, 2.001, 3, 4], False, True),
        ([1, 2, 9, 9], False, True),
        ([5, 6, 7, 8], False, False),
        ([np.nan] * 4, False, False),
        ([1], False, True),
    ],
)
def test_curves(other, same, covers):
    one, two = series([1, 2, 3, 4]), series(other)
    assert (are_equal(one, two), cover_each_other(one, two)) == (same, covers)


def test_curves_of_other_steps_do_not_cover_each_other():
    assert not cover_each_other(series([1, 1]), series([1, 1], first=9))


def test_runs_are_equal_only_in_all_curves_of_a_chart():
    one, two = series([1, 2]), series([1, 3])
    runs = [{"a": one, "b": one}, {"a": one, "b": two}, {"a": one, "b": one}, {}, {"a": one}]
    assert equal_runs(["p", "q", "r", "s", "t"], runs) == ["p = r"]
