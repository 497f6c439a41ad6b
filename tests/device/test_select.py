"""From a device's name and options to a backend."""

from __future__ import annotations

import dataclasses
import importlib.util
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from backends import (
    Backend,
    BackendError,
    BackendUnavailable,
    CompileOptions,
    backend_names,
    make_backend,
)
from backends.accelerator import AcceleratorBackend
from backends.cpu import CpuBackend
from backends.cuda import CudaBackend
from backends.fake import FakeBackend
from backends.meta import MetaBackend
from backends.parallel.backend import ParallelBackend
from backends.select import _options_of, _over_ranks


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
    with pytest.raises(BackendUnavailable, match=r"'mps' is not available: torch .* 2 x xpu"):
        make_backend("mps")


def test_all_names_are_listed() -> None:
    assert {"auto", "cpu", "cuda", "fake", "gpu", "meta", "xpu"} <= set(backend_names())


def test_a_name_like_none_gets_the_list() -> None:
    with pytest.raises(BackendUnavailable, match=r"'abacus' is not a backend. Known: auto, cpu"):
        make_backend("abacus")


@pytest.mark.parametrize(
    ("device", "facts"),
    [
        ("cuda:0", ("use device: cuda.", "CUDA_VISIBLE_DEVICES=0")),
        ("GPU:3", ("use device: gpu.", "CUDA_VISIBLE_DEVICES=3")),
        ("xpu:1", ("use device: xpu.", "backend.index: 1")),
        ("cpu:0", ("use device: cpu.",)),
        ("auto:1", ("use device: auto.",)),
        ("cuda:", ("use device: cuda.",)),
        ("cuda:x", ("Did you mean 'cuda'?",)),
    ],
)
def test_a_device_with_an_index_is_told_how_to_choose_it(device: str, facts: tuple) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        make_backend(device)
    said = str(caught.value)
    assert said.startswith(f"device: {device!r} is not a backend. ")
    assert [fact for fact in facts if fact not in said] == []


def test_options_of_every_level_are_known() -> None:
    backend = make_backend("fake", {"look_ahead": False, "lag": 1, "compile": {"mode": "default"}})
    assert backend.reads.lag == 1
    assert backend._compile == CompileOptions(mode="default")


def test_an_option_of_another_backend_is_refused() -> None:
    with pytest.raises(BackendError, match=r"backend.guard: no such option of cpu"):
        make_backend("cpu", {"guard": "warn"})


def test_an_unknown_compile_option_is_refused() -> None:
    with pytest.raises(BackendError, match=r"backend\.compile\.speed: no such option\. Known: ba"):
        make_backend("cpu", {"compile": {"speed": "max"}})
    with pytest.raises(BackendError, match=r"backend\.compile\.modee: .* Did you mean 'mode'"):
        make_backend("cpu", {"compile": {"modee": "max"}})


SHIPPED = {
    **{cls.__name__: cls for cls in (CpuBackend, FakeBackend, MetaBackend, CudaBackend)},
    "AcceleratorBackend": partial(AcceleratorBackend, kind="xpu"),
    "ParallelBackend": _over_ranks(CpuBackend),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_option_refuses_a_value_of_another_type(name: str) -> None:
    make = SHIPPED[name]
    options = _options_of(make.func if isinstance(make, partial) else make)
    assert len(options) >= 5
    for option in options:
        with pytest.raises(BackendError, match=rf"^backend\.{option}: expected .*got <object"):
            make(**{option: object()})


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CompileOptions)])
def test_every_compile_option_refuses_a_value_of_another_type(field: str) -> None:
    with pytest.raises(BackendError, match=rf"^backend\.compile\.{field}: expected .*got 3\.5"):
        make_backend("cpu", {"compile": {field: 3.5}})


@pytest.mark.parametrize(("field", "said"), [("mode", "fast"), ("backend", "nope")])
def test_what_torch_does_not_know_is_refused_before_the_first_step(field: str, said: str) -> None:
    backend = make_backend("cpu", {"compile": {field: said}})
    with pytest.raises(BackendError, match=rf"^backend\.compile: .*{said}"):
        backend.prepare_model(torch.nn.Linear(2, 2))


def test_an_unknown_compile_target_is_refused() -> None:
    with pytest.raises(BackendError, match=r"target: .*'model', 'blocks' or None.*'layers'"):
        make_backend("cpu", {"compile": "layers"})


# ---- classes


class TinyBackend(CpuBackend):
    """The CPU under another name."""

    name = "tiny"

    def __init__(self, *, speed: int, color: str = "red", **options: Any) -> None:
        super().__init__(**options)
        self.speed, self.color = speed, color


class Absent(CpuBackend):
    @staticmethod
    def is_available() -> bool:
        return False


class Narrow(CpuBackend):
    """Takes one option and passes none to its base."""

    def __init__(self, speed: int = 1) -> None:
        super().__init__()
        self.speed = speed


def test_a_class_is_made_with_its_options_and_those_of_its_base() -> None:
    backend = make_backend(TinyBackend, {"speed": 3, "lag": 2, "timeout": 5.0})
    assert isinstance(backend, TinyBackend)
    assert (backend.speed, backend.color, backend.reads.lag) == (3, "red", 2)
    assert make_backend(Narrow, {"speed": 4}).speed == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (TinyBackend, {"speeed": 3}, r"backend\.speeed: no such option of tiny. .*'speed'"),
        (TinyBackend, {"color": "blue"}, r"backend\.speed: missing; TinyBackend requires it"),
        (Narrow, {"lag": 2}, r"backend\.lag: no such option of cpu"),
        (Absent, {}, r"device: Absent is not available"),
        (Backend, {}, r"device: Backend is not a complete backend. Define device, is_availa.*name"),
    ],
)
def test_a_class_that_cannot_be_made_is_refused(
    kind: type[Backend], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        make_backend(kind, options)


def test_in_several_ranks_a_class_gets_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.select._has_others", lambda: True)
    backend = make_backend(TinyBackend, {"speed": 3, "parallel": {"shard": -1}})
    assert isinstance(backend, TinyBackend)
    assert isinstance(backend, ParallelBackend)
    assert backend.settings.shard == -1
    with pytest.raises(BackendError, match=r"'fake' supports a single process"):
        make_backend("fake")


# ---- XLA where it is not installed

no_xla = pytest.mark.skipif(
    any(map(importlib.util.find_spec, ("torch_xla", "torch_tpu"))),
    reason="torch_xla or torch_tpu is installed",
)


def test_xla_and_tpu_are_among_the_names() -> None:
    assert {"xla", "tpu"} <= set(backend_names())


@no_xla
@pytest.mark.parametrize("device", ["xla", "XLA", "Xla"])
def test_xla_without_its_package_is_told_which_one_to_install(device: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        make_backend(device)
    facts = (
        f"device: {device!r} ",
        "torch_xla",
        "'modelzoo-trainer[xla]'",
        "torch 2.9",
        "cpu or auto",
    )
    assert [fact for fact in facts if fact not in str(caught.value)] == []
    assert "tpu" not in str(caught.value)


@no_xla
@pytest.mark.parametrize("device", ["tpu", "TPU"])
def test_a_tpu_without_a_package_is_told_of_both(device: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        make_backend(device, {"lag": 3})
    facts = (f"device: {device!r} ", "'modelzoo-trainer[xla]'", "'modelzoo-trainer[tpu]'", "2.11")
    assert [fact for fact in facts if fact not in str(caught.value)] == []


def test_the_extras_that_are_named_exist() -> None:
    path = Path(__file__).resolve().parents[2] / "pyproject.toml"
    extras = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {"xla", "tpu"} <= extras.keys()


def test_a_name_near_xla_gets_a_suggestion() -> None:
    with pytest.raises(BackendUnavailable, match=r"'xlaa' is not a backend\. Did you mean 'xla'\?"):
        make_backend("xlaa")
