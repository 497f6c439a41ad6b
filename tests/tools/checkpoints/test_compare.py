import numpy as np
import pytest
import torch

from modelzoo_trainer.tools.checkpoints.compare import compare


def lines(before, after):
    return [f"{item.kind} {item.name}: {item.what}" for item in compare(before, after)]


def test_equal_states_do_not_differ():
    state = {"model": {"w": torch.tensor([1.0, float("nan")])}, "x": [1, (2.5, {}), None, b"a"]}
    other = {"model": {"w": torch.tensor([1.0, float("nan")])}, "x": [1, (2.5, {}), None, b"a"]}
    assert compare(state, other) == []


def test_what_is_only_in_one_of_them_is_told():
    before, after = {"a": {"w": torch.zeros(2, 3)}}, {"a": {"v": [1, 2]}}
    assert lines(before, after) == [
        "added a.v[0]: 1",
        "added a.v[1]: 2",
        "removed a.w: float32 [2, 3]",
    ]


def test_values_that_changed_are_counted_with_the_largest_difference():
    before = torch.zeros(2, 3)
    after = before.clone()
    after[0, 1], after[1, 2] = 0.5, -2.0
    assert lines({"w": before}, {"w": after}) == [
        "changed w: 2 of 6 values of float32 [2, 3], by up to 2"
    ]


def test_another_dtype_or_shape_is_told():
    assert lines({"w": torch.zeros(3)}, {"w": torch.zeros(3).double()}) == [
        "changed w: float32 [3] -> float64 [3]"
    ]
    assert lines({"w": torch.zeros(3)}, {"w": torch.zeros(3, 1)}) == [
        "changed w: float32 [3] -> float32 [3, 1]"
    ]


def test_a_zero_that_changed_its_sign_differs_by_nothing_but_differs():
    assert lines({"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([-0.0, 1.0])}) == [
        "changed w: 1 of 2 values of float32 [2], by up to 0"
    ]
    assert lines({"x": 0.0}, {"x": -0.0}) == ["changed x: 0.0 -> -0.0"]


def test_a_value_that_became_nan_differs_infinitely():
    nan, inf = float("nan"), float("inf")
    before, after = torch.tensor([1.0, inf, nan, 2.0]), torch.tensor([nan, inf, nan, 2.5])
    assert lines({"w": before}, {"w": after}) == [
        "changed w: 2 of 4 values of float32 [4], by up to inf"
    ]


@pytest.mark.parametrize(
    "dtype",
    [
        *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "complex64"),
    ],
)
def test_every_dtype_is_compared(dtype):
    dtype = getattr(torch, dtype)
    before, after = torch.tensor([1, 2, 3]).to(dtype), torch.tensor([1, 4, 3]).to(dtype)
    name = str(dtype).removeprefix("torch.")
    assert lines({"w": before}, {"w": after}) == [
        f"changed w: 1 of 3 values of {name} [3], by up to 2"
    ]


def test_truth_values_and_scalars_are_compared():
    before, after = torch.tensor([True, False]), torch.tensor([True, True])
    assert lines({"w": before}, {"w": after}) == ["changed w: 1 of 2 values of bool [2]"]
    assert lines({"w": torch.tensor(1.0)}, {"w": torch.tensor(4.0)}) == [
        "changed w: 1 of 1 values of float32 [], by up to 3"
    ]


def test_more_values_than_are_compared_at_a_time_are_all_compared():
    before = torch.zeros(3 << 20, dtype=torch.uint8)
    after = before.clone()
    after[-1], after[0] = 7, 3
    assert lines({"w": before}, {"w": after}) == [
        "changed w: 2 of 3145728 values of uint8 [3145728], by up to 7"
    ]


def test_arrays_and_scalars_of_numpy_are_compared():
    before = {"a": np.array([1.0, 2.0]), "b": np.float32(1.5), "c": np.zeros(2, np.int8)}
    after = {"a": np.array([1.0, 3.0]), "b": np.float32(2.5), "c": np.zeros(2, np.int16)}
    assert lines(before, after) == [
        "changed a: 1 of 2 values of float64 [2], by up to 1",
        "changed b: np.float32(1.5) -> np.float32(2.5)",
        "changed c: array int8 [2] -> array int16 [2]",
    ]


def test_another_type_of_an_equal_value_is_a_change():
    assert lines({"a": 1, "b": True}, {"a": 1.0, "b": 1}) == [
        "changed a: 1 -> 1.0",
        "changed b: True -> 1",
    ]


def test_another_kind_of_container_is_a_change():
    assert lines({"a": [1], "b": {}}, {"a": (1,), "b": []}) == [
        "added a[0]: 1",
        "removed a[0]: 1",
        "changed b: {} -> []",
    ]


def test_keys_that_look_alike_are_told_apart():
    assert compare({"a": {1: 0}}, {"a": {"1": 0}})
    assert compare({"a.b": 1, "a": {"b": 2}}, {"a.b": 1, "a": {"b": 3}})


def test_long_values_are_shortened():
    (line,) = lines({"x": "a" * 100}, {"x": "b" * 100})
    assert line == f"changed x: '{'a' * 56}... -> '{'b' * 56}..."
