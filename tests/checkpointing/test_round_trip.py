import math
import random
import re
import stat

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelzoo_trainer import CheckpointError, checkpointing

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
KEYS = st.text(max_size=6) | st.integers(-5, 5)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


def same(left, right):
    """Equal, with types, the bits of floats, and the order of keys."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        assert all(same(left[key], right[key]) for key in left)
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        assert all(map(same, left, right))
    elif isinstance(left, float):
        assert left.hex() == right.hex()
    else:
        assert left == right
    return True


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(state=STATES)
def test_plain_values_come_back_with_their_types_and_bits(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("plain") / "c"
    checkpointing.save(path, {"callbacks": {"x": state}}, step=1)
    assert same(checkpointing.load(path)["callbacks"]["x"], state)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.zeros(0, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor([1.0, -0.0, math.nan], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.arange(4, dtype=torch.int8)[1::2],
    ],
    ids=["0-d", "empty", "transposed", "bfloat16", "bool", "complex", "strided"],
)
def test_tensors_come_back(tmp_path, tensor):
    checkpointing.save(tmp_path / "c", {"model": {"w": tensor}}, step=1)
    found = checkpointing.load(tmp_path / "c")["model"]["w"]
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(found.nan_to_num(), tensor.nan_to_num())


def test_numpy_states_come_back(tmp_path):
    state = np.random.RandomState(3).get_state(legacy=False)
    checkpointing.save(
        tmp_path / "c", {"rng": {"numpy": state, "python": random.getstate()}}, step=1
    )
    found = checkpointing.load(tmp_path / "c")["rng"]
    assert np.array_equal(found["numpy"]["state"]["key"], state["state"]["key"])
    assert found["python"] == random.getstate()


def test_tied_tensors_are_stored_once_and_come_back_as_one(tmp_path):
    weight = torch.randn(100, 100)
    checkpointing.save(tmp_path / "c", {"model": {"a": weight, "b": weight}}, step=1)
    found = checkpointing.load(tmp_path / "c")["model"]
    assert found["a"] is found["b"]
    assert (tmp_path / "c/model.safetensors").stat().st_size < 2 * weight.nbytes


def test_the_optimizer_of_a_model_comes_back(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpointing.save(tmp_path / "c", {"optimizer": optimizer.state_dict()}, step=1)
    found = checkpointing.load(tmp_path / "c")["optimizer"]
    torch.optim.AdamW(model.parameters()).load_state_dict(found)
    assert list(found["state"]) == [0, 1]
    assert found["param_groups"] == optimizer.state_dict()["param_groups"]


def test_loaded_tensors_do_not_depend_on_the_files(tmp_path):
    checkpointing.save(tmp_path / "c", {"model": {"w": torch.ones(1000)}}, step=1)
    found = checkpointing.load(tmp_path / "c")["model"]["w"]
    (tmp_path / "c/model.safetensors").write_bytes(b"")
    assert found.sum() == 1000


@pytest.mark.parametrize("value", [{1}, object(), torch.nn.Linear, lambda: 0])
def test_what_cannot_be_saved_is_named(tmp_path, value):
    with pytest.raises(CheckpointError, match=re.escape("callbacks.Mine.x[1] is a")):
        checkpointing.save(tmp_path / "c", {"callbacks": {"Mine": {"x": [0, value]}}}, step=1)
    assert list(tmp_path.iterdir()) == []


def test_the_model_file_has_the_modules_names(tmp_path):
    from safetensors import safe_open

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    checkpointing.save(tmp_path / "c", {"model": model.state_dict()}, step=1)
    with safe_open(tmp_path / "c/model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["0.bias", "0.weight"]


def test_files_are_readable_as_the_umask_says(tmp_path):
    checkpointing.save(tmp_path / "c", {"model": {"w": torch.ones(2)}}, step=1)
    plain = tmp_path / "plain"
    plain.write_text("x")
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "c").iterdir()}
    assert modes == {stat.S_IMODE(plain.stat().st_mode)}


def test_checkpoints_are_listed_by_step_then_name(tmp_path):
    for name, step in (("checkpoint_100_10", 100), ("checkpoint_100", 100), ("checkpoint_20", 20)):
        checkpointing.save(tmp_path / name, {"global_step": step}, step=step)
    checkpointing.save(tmp_path / "checkpoint_100_2", {}, step=100)
    (tmp_path / "checkpoint_999").mkdir()
    names = [info.path.name for info in checkpointing.list_checkpoints(tmp_path)]
    expected = ["checkpoint_20", "checkpoint_100", "checkpoint_100_2", "checkpoint_100_10"]
    assert names == expected


def test_the_newest_is_the_one_whose_whole_name_fits(tmp_path):
    checkpointing.save(tmp_path / "checkpoint_1", {}, step=1)
    checkpointing.save(tmp_path / "other_checkpoint_2", {}, step=2)
    pattern = re.compile(r"checkpoint_\d+")
    assert checkpointing.newest(tmp_path, pattern) == tmp_path / "checkpoint_1"
    assert checkpointing.newest(tmp_path / "missing", pattern) is None
