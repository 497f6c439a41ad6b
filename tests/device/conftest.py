"""The backends that the contract is tested on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from backends import Backend, make_backend
from backends.accelerator import AcceleratorBackend
from backends.select import _KNOWN, _class_of
from tests.xla_here import HAS_XLA, WHY_NOT

HAS_CUDA = torch.cuda.is_available()
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")]
)
XLA = pytest.param("xla", marks=[pytest.mark.xla, pytest.mark.skipif(not HAS_XLA, reason=WHY_NOT)])
OF_A_KIND = ("cuda", "meta", "xla")  # with marks, or without values


def param(name: str) -> Any:
    """Return a parameter for a backend, skipped where it is not available."""
    is_there = _class_of(name)[1].is_available()
    return pytest.param(name, marks=pytest.mark.skipif(not is_there, reason=f"no {name}"))


HOST = [*map(param, sorted(_KNOWN.keys() - {*OF_A_KIND})), "host-accelerator"]

Make = Callable[..., Backend]


class HostAccelerator(AcceleratorBackend):
    """The accelerator's logic on a device that is always there."""

    def __init__(self, **options: Any) -> None:
        super().__init__(kind="cpu", **options)

    @staticmethod
    def is_available(kind: str | None = None) -> bool:
        return True

    def select_device(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs a CUDA device")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def open_backend() -> Iterator[Make]:
    """A function that makes and opens a backend, closed after the test."""
    opened: list[Backend] = []

    def make(kind: str, **options: Any) -> Backend:
        if kind == "host-accelerator":
            backend: Backend = HostAccelerator(**options)
        else:
            backend = make_backend(kind, options)
        backend.seed = 17
        backend.open()
        opened.append(backend)
        return backend

    yield make
    for backend in opened:
        backend.close()


@pytest.fixture(params=[*HOST, "meta", CUDA, XLA])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[*HOST, CUDA, XLA])
def valued_kind(request: pytest.FixtureRequest) -> str:
    """The kinds whose tensors have values."""
    return str(request.param)


@pytest.fixture(params=["fake", "meta", CUDA, XLA])
def guarded_kind(request: pytest.FixtureRequest) -> str:
    """The kinds that notice a read on the host."""
    return str(request.param)


@pytest.fixture
def backend(kind: str, open_backend: Make) -> Backend:
    return open_backend(kind)


@pytest.fixture
def valued(valued_kind: str, open_backend: Make) -> Backend:
    return open_backend(valued_kind)
