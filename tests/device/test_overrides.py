"""Values of the process that are set for a while."""

import os

import pytest
import torch

from backends import make_backend
from backends.environment import from_environment, hold_hf_cache_dir
from backends.errors import BackendError
from backends.process_settings import (
    Overrides,
    held_switches,
    hold_switches,
    switch_names,
    switch_problem,
)

PRECISION = "torch.set_float32_matmul_precision"


@pytest.fixture
def values():
    return {"a": 0, "b": 0}


@pytest.fixture
def overrides(values):
    def write(name, value):
        if value == "bad":
            raise ValueError("bad")
        values[name] = value

    return Overrides(values.__getitem__, write)


def test_what_was_there_comes_back(values, overrides):
    with overrides.held({"a": 1, "b": 2}):
        assert values == {"a": 1, "b": 2}
    assert values == {"a": 0, "b": 0}


def test_it_comes_back_after_an_error(values, overrides):
    with pytest.raises(ZeroDivisionError), overrides.held({"a": 1}):
        raise ZeroDivisionError
    assert values["a"] == 0


def test_the_last_one_counts_in_whatever_order_they_leave(values, overrides):
    first = overrides.hold({"a": 1})
    second = overrides.hold({"a": 2})
    third = overrides.hold({"a": 3})
    first()
    assert values["a"] == 3
    third()
    assert values["a"] == 2
    second()
    second()
    assert values["a"] == 0


def test_all_are_set_or_none(values, overrides):
    with pytest.raises(ValueError, match="bad"):
        overrides.hold({"a": 1, "b": "bad"})
    assert values == {"a": 0, "b": 0}
    with overrides.held({"b": 3}):
        assert values["b"] == 3
    assert values["b"] == 0


def test_every_switch_can_be_set_and_put_back():
    flipped = {}
    for name in switch_names():
        for value in (True, False, 3, "greedy", "medium"):
            if switch_problem(name, value) is None:
                flipped[name] = value
    assert flipped.keys() == set(switch_names())
    before = torch.get_num_threads(), torch.backends.cudnn.enabled
    with held_switches(flipped):
        assert torch.get_num_threads() == 3
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cudnn.enabled is False
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert (torch.get_num_threads(), torch.backends.cudnn.enabled) == before
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "torch.backends.cudnn.benchmrk",
            True,
            "Did you mean 'torch.backends.cudnn.benchmark'?",
        ),
        ("torch.cuda", True, "is not a known switch of torch"),
        ("torch.backends.cudnn.benchmark", 1, "is 1; expected true or false."),
        ("torch.set_num_threads", 0, "is 0; expected an integer > 0."),
        ("torch.set_num_threads", True, "is True; expected an integer > 0."),
        (PRECISION, "hihg", "is 'hihg'; expected 'highest', 'high', 'medium'."),
    ],
)
def test_what_is_wrong_is_told(name, value, message):
    assert message in switch_problem(name, value)


def test_what_torch_refuses_is_told_and_nothing_is_set(monkeypatch):
    def refuse(value):
        raise RuntimeError("not here")

    from backends import process_settings

    refusing = process_settings.Switch(lambda: False, refuse)
    monkeypatch.setitem(
        process_settings._switches(), "torch.use_deterministic_algorithms", refusing
    )
    values = {"torch.backends.cudnn.benchmark": True, "torch.use_deterministic_algorithms": True}
    message = "torch.use_deterministic_algorithms: torch rejects True: not here"
    with pytest.raises(BackendError, match=message):
        held_switches(values).__enter__()
    assert torch.backends.cudnn.benchmark is False


def test_switches_of_a_backend_go_before_its_own_and_come_back_first():
    backend = make_backend("cpu", {"matmul_precision": "high"})
    backend.open()
    hold_switches(backend, {PRECISION: "medium"})
    assert torch.get_float32_matmul_precision() == "medium"
    backend.close()
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_environment_comes_back_as_it_was(monkeypatch):
    monkeypatch.setenv("HF_HOME", "/mine")
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    let_go = hold_hf_cache_dir("/cache")
    names = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE")
    assert [os.environ[name] for name in names] == ["/cache"] * 4
    let_go()
    assert os.environ["HF_HOME"] == "/mine"
    assert "HF_DATASETS_CACHE" not in os.environ


def test_an_empty_variable_is_none(monkeypatch):
    monkeypatch.setenv("HF_HOME", "")
    assert from_environment("HF_HOME") is None
    monkeypatch.setenv("HF_HOME", "x")
    assert from_environment("HF_HOME") == "x"
