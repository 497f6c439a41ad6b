"""Which curves are the same."""

import numpy as np
import pytest

from modelzoo_trainer.tools.report.coinciding import are_equal, equal_runs
from modelzoo_trainer.tools.report.metrics_file import Series


def series(values, first=1):
    steps = np.arange(first, first + len(values), dtype=float)
    return Series(steps, steps, np.array(values, dtype=float))


@pytest.mark.parametrize(
    ("other", "same"),
    [([1, 2, np.nan], True), ([1, 2.001, np.nan], False), ([1, 2], False)],
)
def test_curves(other, same):
    assert are_equal(series([1, 2, np.nan]), series(other)) == same


def test_curves_of_other_steps_are_not_equal():
    assert not are_equal(series([1, 1]), series([1, 1], first=9))


def test_runs_are_equal_only_in_all_curves_of_a_chart():
    one, two = series([1, 2]), series([1, 3])
    runs = [{"a": one, "b": one}, {"a": one, "b": two}, {"a": one, "b": one}, {}, {"a": one}]
    assert equal_runs(runs) == [[0, 2]]
