"""What a state may hold: how it comes back, and what is refused."""

from __future__ import annotations

import collections
import enum
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelzoo_trainer import CheckpointError, checkpointing

SCALARS = [
    np.bool_(True),
    np.int8(-3),
    np.uint64(2**64 - 1),
    np.float16(0.1),
    np.float32("nan"),
    np.float64(-0.0),
    np.complex64(1 + 2j),
    np.complex128(3j),
]
ARRAYS = [
    np.arange(6.0).reshape(2, 3).T,
    np.arange(6)[::-2],
    np.array(3, np.uint16),
    np.zeros((0, 2), np.float16),
    np.broadcast_to(np.float32(2), (2, 2)),
    np.array([1 + 2j]),
    np.array([True, False]),
]
DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex128]


def round_trip(folder, state):
    path = folder / "c"
    checkpointing.save(path, {"x": {"y": state}}, step=1)
    return checkpointing.load(path)["x"]["y"]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: value.dtype.name)
def test_numpy_scalars_come_back_with_type_and_bits(tmp_path, value):
    found = round_trip(tmp_path, value)
    assert type(found) is type(value)
    assert found.tobytes() == value.tobytes()


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: f"{value.dtype}{value.shape}")
@pytest.mark.slow_cases(every=4)
def test_numpy_arrays_come_back_with_type_and_bits(tmp_path, value):
    found = round_trip(tmp_path, value)
    assert (type(found), found.dtype, found.shape) == (np.ndarray, value.dtype, value.shape)
    assert found.tobytes() == value.tobytes()


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_views_of_tensors_come_back_with_their_bits(tmp_path_factory, shape, dtype, data):
    tensor = torch.randint(0, 2, [length + 2 for length in shape]).to(dtype)
    for axis, length in enumerate(shape):
        tensor = tensor.narrow(axis, data.draw(st.integers(0, 2)), length)
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    found = round_trip(tmp_path_factory.mktemp("view"), tensor)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)


def test_lazy_conjugates_and_negatives_come_back(tmp_path):
    values = torch.tensor([1 + 2j, 3 - 4j])
    found = round_trip(tmp_path, [values, values.conj(), values.conj().imag])
    assert torch.equal(found[0], values)
    assert found[1].tolist() == [1 - 2j, 3 + 4j]
    assert found[2].tolist() == [-2, 4]


def test_tied_memory_stays_tied_across_parts_and_views_stay_apart(tmp_path):
    weight = torch.arange(4.0)
    state = {"model": {"a": weight, "b": weight[1:]}, "ema": [weight, weight.clone()]}
    checkpointing.save(tmp_path / "c", state, step=1)
    found = checkpointing.load(tmp_path / "c")
    found["model"]["a"].fill_(9)
    assert found["ema"][0].tolist() == [9, 9, 9, 9]
    assert found["ema"][1].tolist() == [0, 1, 2, 3]
    assert found["model"]["b"].tolist() == [1, 2, 3]


def test_tensors_that_are_made_when_asked_for_are_not_mixed_up(tmp_path):
    class Lazy(collections.abc.Mapping):
        def __getitem__(self, key):
            return torch.full((1000,), float(key))

        def __iter__(self):
            return iter("123")

        def __len__(self):
            return 3

    found = round_trip(tmp_path, Lazy())
    assert [found[key].unique().tolist() for key in "123"] == [[1], [2], [3]]


def test_keys_keep_their_type_and_order(tmp_path):
    state = {3: 1, "3": 2, -1: 3, 2**80: 4, 10**5000: 5, "__type__": "tensor"}
    found = round_trip(tmp_path, state)
    assert list(found.items()) == list(state.items())


def test_integers_of_any_length_come_back(tmp_path):
    values = [2**63 - 1, 2**63, -(2**63), -(10**5000), 0]
    assert round_trip(tmp_path, values) == values


def test_text_and_names_of_any_kind_come_back(tmp_path):
    state = {"\ud800": torch.ones(1), "a.b": torch.ones(2), "a": {"b": torch.ones(3)}, "": "\x00"}
    found = round_trip(tmp_path, state)
    assert [len(found["\ud800"]), len(found["a.b"]), len(found["a"]["b"])] == [1, 2, 3]
    assert found[""] == "\x00"


def test_any_name_of_a_part_and_of_a_tensor_is_saved(tmp_path):
    names = ["model", "Model", "my-part", "a/b", "..", "", "manifest", "x" * 300, "__metadata__"]
    state = {name: {"__metadata__": torch.tensor(float(idx))} for idx, name in enumerate(names)}
    checkpointing.save(tmp_path / "c", state, step=1)
    found = checkpointing.load(tmp_path / "c")
    assert {name: part["__metadata__"].item() for name, part in found.items()} == {
        name: idx for idx, name in enumerate(names)
    }
    files = [file.name.lower() for file in (tmp_path / "c").iterdir()]
    assert len(files) == len(set(files)) == len(names) + 2


def test_subclasses_of_containers_come_back_as_plain_ones(tmp_path):
    Pair = collections.namedtuple("Pair", "a b")
    found = round_trip(tmp_path, [collections.OrderedDict(a=1), Pair(1, 2), torch.Size([3])])
    assert found == [{"a": 1}, (1, 2), (3,)]
    assert [type(value) for value in found] == [dict, tuple, tuple]


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Color.RED, "is a Color, which cannot"),
        (1j, "is a complex, which cannot"),
        (np.ma.array([1, 2], mask=[0, 1]), "is a MaskedArray of int64"),
        (np.ones(2, ">f4"), "is a ndarray of >f4"),
        (np.array(["a"]), "is a ndarray of <U1"),
        (np.array([None]), "is a ndarray of object"),
        (np.datetime64("2020-01-01"), "is a datetime64, which cannot"),
        (torch.eye(2).to_sparse(), "is a Tensor of torch.sparse_coo on cpu"),
        (torch.empty(2, device="meta"), "is a Tensor of torch.strided on meta"),
        ({True: 1}, r"is a dict with the key True \(neither str nor int"),
        ({(1,): 1}, r"is a dict with the key \(1,\)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_as_it_was_is_refused_by_its_place(tmp_path, value, message):
    state = {"callbacks": {"Foo": {"x": [0, 1, value]}}}
    with pytest.raises(CheckpointError, match=rf"^callbacks\.Foo\.x\[2\] {message}"):
        checkpointing.save(tmp_path / "c", state, step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_contains_itself_is_refused(tmp_path):
    state = {"a": {}}
    state["a"]["b"] = state
    with pytest.raises(CheckpointError, match="a is nested too deeply, or contains itself"):
        checkpointing.save(tmp_path / "c", state, step=1)


@pytest.mark.parametrize("key", [1, None, True])
def test_the_names_of_the_parts_are_text(tmp_path, key):
    with pytest.raises(CheckpointError, match=f"must be strings, got {key!r}"):
        checkpointing.save(tmp_path / "c", {key: 1}, step=1)


@pytest.mark.parametrize(
    "state_json",
    [
        '{"x": {"__type__": "object"}}',
        '{"x": {"__type__": ["tensor"]}}',
        '{"x": {"__type__": "tensor"}}',
        '{"x": {"__type__": "tensor", "file": "model", "name": "none"}}',
        '{"x": {"__type__": "scalar", "dtype": "object", "bits": "0000000000000000"}}',
        '{"x": {"__type__": "scalar", "dtype": "float64", "bits": ""}}',
        '{"x": {"__type__": "float", "bits": "00"}}',
        '{"x": {"__type__": "bytes", "base64": "*"}}',
        '{"x": {"__type__": "dict", "items": [[[], 1]]}}',
        '{"x": {"__type__": "dict", "items": 3}}',
        '{"x": {"__type__": "array", "tensor": 3}}',
        "[]",
        "{",
        "[" * 100_000,
        '{"x":' * 990 + "1" + "}" * 990,
    ],
    ids=range(15),
)
def test_a_malformed_state_with_the_right_digest_is_one_clear_error(tmp_path, state_json):
    path = tmp_path / "c"
    checkpointing.save(path, {"x": 1}, step=1)
    (path / "state.json").write_text(state_json)
    manifest = checkpointing.read_manifest(path)
    manifest.files["state.json"] = checkpointing.manifest.record_of(path / "state.json")
    (path / "manifest.json").write_text(manifest.to_json())
    depth = sys.getrecursionlimit()
    with pytest.raises(CheckpointError, match=r"cannot be read|contains no state"):
        checkpointing.load(path)
    assert sys.getrecursionlimit() == depth


@pytest.mark.parametrize(
    ("before", "within"),
    [("", ""), ("_orig_mod.", ""), ("module.", ""), ("module._orig_mod.", ""), ("", "_orig_mod.")],
)
def test_the_tensor_file_has_the_bare_models_names_whatever_wraps_it(tmp_path, before, within):
    from safetensors import safe_open

    state = {f"{before}0.weight": torch.ones(1), f"{before}1.{within}bias": torch.ones(2)}
    checkpointing.save(tmp_path / "c", {"model": state}, step=1)
    with safe_open(tmp_path / "c/model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["0.weight", "1.bias"]
    assert list(checkpointing.load(tmp_path / "c")["model"]) == list(state)


def test_a_part_of_a_model_may_be_called_module(tmp_path):
    from safetensors import safe_open

    state = {
        "n_averaged": torch.tensor(1),
        "module.w": torch.ones(1),
        "my_orig_mod.w": torch.ones(1),
    }
    checkpointing.save(tmp_path / "c", {"model": state}, step=1)
    with safe_open(tmp_path / "c/model.safetensors", "pt") as file:
        assert set(file.keys()) == set(state)


def test_names_that_become_the_same_stay_two_tensors(tmp_path):
    state = {"a._orig_mod.w": torch.ones(1), "a.w": torch.zeros(1)}
    checkpointing.save(tmp_path / "c", {"model": state}, step=1)
    assert checkpointing.load(tmp_path / "c")["model"] == state
