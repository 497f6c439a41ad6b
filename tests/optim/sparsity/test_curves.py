import math

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.sparsity import (
    CURVES,
    GMP,
    Constant,
    Cosine,
    Cubic,
    Cycling,
    Exp,
    Linear,
    Power,
    Static,
    UpdateEvery,
)
from modelzoo_trainer.optim.sparsity.curves import as_curve


def test_a_constant_stays():
    assert [Constant(0.3).value(step) for step in (0, 7)] == [0.3, 0.3]


def test_a_line_continues():
    assert Linear(0.1, 0.02).value(10) == pytest.approx(0.3)


def test_exp_approaches_its_end():
    curve = Exp(0.2, gamma=0.1, final=0.9)
    assert curve.value(0) == pytest.approx(0.2)
    assert curve.value(10) == pytest.approx(0.9 - 0.7 / math.e)


def test_power_approaches_its_end_by_a_factor():
    assert [Power(0, 0.5).value(step) for step in range(4)] == [0, 0.5, 0.75, 0.875]


@pytest.mark.parametrize(
    ("curve", "fractions"),
    [
        (Exp(0.5, gamma=-5000), [0.5, 0, 0]),
        (Exp(0.5, gamma=-5000, final=0.5), [0.5, 0.5, 0.5]),
        (Power(0.5, 1e300, final=0.25), [0.5, 1, 1]),
        (Power(0.5, -1e300, final=0.25), [0.5, 0, 1]),
    ],
)
def test_a_curve_may_leave_what_a_float_holds(curve, fractions):
    algorithm = Static(0.5)
    algorithm.fraction, algorithm.updates = curve, UpdateEvery(1)
    assert [algorithm.fraction_at(step) for step in range(3)] == fractions
    assert algorithm.fraction_at(9999) == fractions[1]


def test_a_cosine_goes_to_its_minimum_and_back():
    curve = Cosine(0.3, half_period=100, minimum=0.1)
    found = [curve.value(step) for step in (0, 50, 100, 200)]
    assert found == pytest.approx([0.3, 0.2, 0.1, 0.3])
    assert Cosine(0.3, 4).value(1) == pytest.approx(0.15 * (1 + math.sqrt(0.5)))


def test_a_cycle_continues_with_each_update_or_by_its_period():
    assert [Cycling([1, 2, 3]).value(99, index) for index in range(4)] == [1, 2, 3, 1]
    assert [Cycling([1, 2], period=3).value(step) for step in (0, 2, 3, 5, 6)] == [1, 1, 2, 2, 1]


def test_the_cubic_schedule_is_that_of_zhu_and_gupta():
    first, last, start, num, freq = 0.1, 0.9, 20, 10, 5
    curve = Cubic(last, steps=num * freq, init=first, start=start)
    expected = [last + (first - last) * (1 - k / num) ** 3 for k in range(num + 1)]
    assert [curve.value(start + k * freq) for k in range(num + 1)] == pytest.approx(expected)
    assert [curve.value(step) for step in (0, 20, 70, 1000)] == pytest.approx(
        [first, first, last, last]
    )


def test_a_mapping_names_a_curve():
    assert as_curve({"type": "Linear", "init": 0, "slope": 0.5}, "x").value(1) == 0.5
    assert list(CURVES) == ["constant", "linear", "exp", "power", "cosine", "cycling", "cubic"]


def test_what_a_curve_says_is_limited_where_it_is_used():
    algorithm = Static(0.5)
    algorithm.fraction = Linear(0.5, 1)
    assert algorithm.fraction_at(0) == 0.5
    algorithm.fraction = Constant(-1)
    assert algorithm.fraction_at(0) == 0
    algorithm.fraction = Constant(3)
    assert algorithm.num_kept(0, 10) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (1, r"GMP.sparsity: expected a number in \[0, 1\).*, got 1\."),
        (True, "GMP.sparsity: expected a number.*, got true"),
        ("a", "GMP.sparsity: expected a number.*, got 'a'"),
        ({"type": "cosin"}, "GMP.sparsity.type is 'cosin'. Did you mean 'cosine'?"),
        ({"init": 1}, "GMP.sparsity.type is missing. Known: constant"),
        ({"type": "exp", "init": 1}, "GMP.sparsity.gamma is missing; Exp requires it"),
        ({"type": "exp", "init": 1, "gama": 2}, "sparsity.gama: no such argument of Exp. Did you"),
        (
            {"type": "linear", "init": math.nan, "slope": 0},
            "Linear.init: .* finite .*, got nan",
        ),
        ({"type": "cosine", "init": 1, "half_period": 0}, "Cosine.half_period: .* > 0, got 0"),
        ({"type": "cubic", "final": 0.9, "steps": 1.5}, "Cubic.steps: .* integer .*, got 1.5"),
        ({"type": "cycling", "values": []}, r"Cycling.values: expected a list .*, got \[\]"),
        ({"type": "cycling", "values": [0, "a"]}, r"Cycling.values\[1\]: .*, got 'a'"),
    ],
)
def test_what_is_no_curve_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        GMP(given)
