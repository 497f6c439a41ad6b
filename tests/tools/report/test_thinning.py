import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelzoo_trainer.tools.report.thinning import MAX_NON_FINITE, thin


def test_a_short_curve_stays_as_it_is():
    thinned = thin(np.arange(100.0), 100)
    assert thinned.kept.tolist() == list(range(100))
    assert len(thinned.means) == 0


def test_spikes_up_and_down_are_kept():
    values = np.sin(np.arange(100_000) / 1000)
    values[[12_345, 77_777]] = 50, -50
    thinned = thin(values, 1000)
    assert len(thinned.kept) <= 1000
    assert {12_345, 77_777} <= set(thinned.kept.tolist())


def test_the_ends_are_kept():
    kept = thin(np.tile([0.0, 1.0, 0.5], 1000), 50).kept
    assert (kept[0], kept[-1]) == (0, 2999)


def test_means_are_those_of_the_values_and_not_of_the_kept_ones():
    values = np.zeros(10_000)
    values[::100] = 100.0
    thinned = thin(values, 100)
    assert thinned.means.mean() == pytest.approx(1.0, rel=0.05)
    assert len(thinned.centers) == len(thinned.means)


def test_values_that_are_not_finite_are_apart():
    values = np.arange(1000.0)
    values[[10, 20]] = np.nan, np.inf
    thinned = thin(values, 100)
    assert thinned.non_finite.tolist() == [10, 20]
    assert not {10, 20} & set(thinned.kept.tolist())


def test_many_values_that_are_not_finite_are_thinned_and_counted():
    thinned = thin(np.full(100_000, np.nan), 100)
    assert len(thinned.non_finite) == MAX_NON_FINITE
    assert (thinned.num_non_finite, len(thinned.kept)) == (100_000, 0)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.floats(-1e30, 1e30) | st.sampled_from([np.nan, np.inf]), max_size=300),
    st.integers(4, 60),
)
def test_extremes_stay_and_order_is_kept(values, max_points):
    array = np.array(values, dtype=np.float64)
    kept = thin(array, max_points).kept
    finite = array[np.isfinite(array)]
    assert len(kept) <= max(max_points, 4)
    assert np.all(np.diff(kept) > 0)
    if len(finite):
        assert array[kept].min() == finite.min()
        assert array[kept].max() == finite.max()
