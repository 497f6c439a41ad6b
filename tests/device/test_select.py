"""From a device's name and options to a backend."""

from __future__ import annotations

import pytest
import torch

from backends import BackendError, BackendUnavailable, CompileOptions, backend_names, make_backend
from backends.accelerator import AcceleratorBackend
from backends.cpu import CpuBackend


def test_names_are_taken_in_any_case() -> None:
    assert isinstance(make_backend("CPU"), CpuBackend)


def test_auto_is_the_cpu_where_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert isinstance(make_backend("auto"), CpuBackend)


def test_auto_is_the_accelerator_that_torch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = torch.device("xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    backend = make_backend("auto", {"index": 1})
    assert isinstance(backend, AcceleratorBackend)
    assert backend.device == torch.device("xpu", 1)


def test_another_accelerator_than_the_one_there_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = torch.device("xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(BackendUnavailable, match=r"'mps' was asked for, but torch .* 2 x xpu"):
        make_backend("mps")


def test_all_names_are_listed() -> None:
    assert {"auto", "cpu", "cuda", "fake", "gpu", "meta", "xpu"} <= set(backend_names())


def test_a_name_like_none_gets_the_list() -> None:
    with pytest.raises(BackendUnavailable, match=r"'abacus' is not a backend. Known: auto, cpu"):
        make_backend("abacus")


def test_options_of_every_level_are_known() -> None:
    backend = make_backend("fake", {"look_ahead": False, "lag": 1, "compile": {"mode": "default"}})
    assert backend.lag == 1
    assert backend.compile == CompileOptions(mode="default")


def test_an_option_of_another_backend_is_refused() -> None:
    with pytest.raises(BackendError, match=r"backend.guard: no such option of cpu"):
        make_backend("cpu", {"guard": "warn"})


def test_an_unknown_compile_option_is_refused() -> None:
    with pytest.raises(BackendError, match=r"backend.compile: .*unexpected keyword.*'speed'"):
        make_backend("cpu", {"compile": {"speed": "max"}})


def test_an_unknown_compile_target_is_refused() -> None:
    with pytest.raises(BackendError, match=r"target is 'layers'; use 'model' or 'blocks'"):
        make_backend("cpu", {"compile": "layers"})
