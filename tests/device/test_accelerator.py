"""What accelerators have of their own: their place, and CUDA's switches."""

from __future__ import annotations

import importlib
import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends import BackendError, BackendUnavailable, make_backend
from backends.accelerator import AcceleratorBackend
from backends.cuda import CudaBackend

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with four; the list has those that were made current."""
    chosen: list[int] = []
    monkeypatch.setattr(AcceleratorBackend, "is_available", staticmethod(lambda kind=None: True))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


def test_the_device_is_that_of_the_local_rank(
    four_devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    backend = AcceleratorBackend(kind="xpu")
    backend.select_device()
    assert four_devices == [3]
    assert backend.device == torch.device("xpu", 3)


def test_an_index_that_is_given_goes_before_the_local_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert AcceleratorBackend(kind="xpu", index=1).device.index == 1


def test_a_local_rank_without_a_device_is_refused(
    four_devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "4")
    message = r"LOCAL_RANK is 4, but this process sees 4 xpu devices \(0-3\). Start at most 4"
    with pytest.raises(BackendUnavailable, match=message):
        AcceleratorBackend(kind="xpu").select_device()


def test_an_index_without_a_device_is_refused(four_devices: list[int]) -> None:
    with pytest.raises(BackendUnavailable, match=r"backend.index is 7, but this process sees 4"):
        AcceleratorBackend(kind="xpu", index=7).select_device()


def test_a_kind_that_is_not_there_is_refused_at_open() -> None:
    with pytest.raises(
        BackendUnavailable, match=r"'hpu' is not available: torch .* finds no such device"
    ):
        AcceleratorBackend(kind="hpu").open()


def test_a_random_state_of_another_device_is_left_alone(open_backend: Any) -> None:
    backend = open_backend("host-accelerator")
    state = {**backend.rng_state(), "device": object(), "device_kind": "other"}
    backend.set_rng_state(state)
    assert backend.rng_state()["device_kind"] == "cpu"


@pytest.fixture
def device_module(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What torch has for a kind of device: a generator and figures of its memory."""
    module = SimpleNamespace(
        default_generators=(torch.Generator(),),
        memory_allocated=lambda: 5,
        max_memory_allocated=lambda: 7,
        driver_allocated_memory=lambda: 9,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_a_step_seeds_the_devices_generator(
    device_module: SimpleNamespace, open_backend: Any
) -> None:
    backend = open_backend("host-accelerator")
    (generator,) = device_module.default_generators
    with backend.step(3):
        first = torch.rand(2, generator=generator)
    torch.rand(5, generator=generator)
    with backend.step(3):
        assert torch.equal(torch.rand(2, generator=generator), first)


def test_a_device_without_a_generator_of_its_own_is_seeded_through_its_module(
    device_module: SimpleNamespace, open_backend: Any
) -> None:
    seeds: list[int] = []
    backend = open_backend("host-accelerator")
    device_module.default_generators = ()
    device_module.manual_seed = seeds.append
    for index in (3, 4, 3):
        with backend.step(index):
            pass
    assert seeds[0] == seeds[2] != seeds[1]


def test_the_devices_random_state_is_restored(
    device_module: SimpleNamespace, open_backend: Any
) -> None:
    backend = open_backend("host-accelerator")
    (generator,) = device_module.default_generators
    state = backend.rng_state()
    first = torch.rand(2, generator=generator)
    backend.set_rng_state(state)
    assert torch.equal(torch.rand(2, generator=generator), first)


def test_memory_has_the_figures_that_the_device_keeps(
    device_module: SimpleNamespace, open_backend: Any
) -> None:
    figures = open_backend("host-accelerator").memory()
    del figures["host_peak_bytes"]
    assert figures == {
        "device_allocated_bytes": 5,
        "device_peak_bytes": 7,
        "device_reserved_bytes": 9,
    }


def test_dtypes_are_those_that_the_device_supports(
    device_module: SimpleNamespace, open_backend: Any
) -> None:
    device_module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float32]
    assert open_backend("host-accelerator").caps.autocast_dtypes == {torch.bfloat16}


def test_an_unknown_guard_is_refused() -> None:
    with pytest.raises(BackendError, match=r"guard: .*'off', 'warn' or 'error'.*'loud'"):
        CudaBackend(guard="loud")  # type: ignore[arg-type]


@pytest.fixture
def sync_levels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The levels that CUDA's guard was set to, from 0 on."""
    levels = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: levels[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", levels.append)
    return levels


@pytest.mark.parametrize(
    ("guard", "expected"), [("off", [0]), ("warn", [0, 1, 0]), ("error", [0, 2, 0])]
)
def test_the_guard_is_up_in_the_step_alone(
    sync_levels: list[int], guard: Any, expected: list[int]
) -> None:
    backend = CudaBackend(guard=guard)
    with backend.step(0):
        pass
    assert sync_levels == expected


def test_a_step_that_compiles_may_wait_and_the_next_one(sync_levels: list[int]) -> None:
    backend = CudaBackend(guard="error")
    compiled = torch.compile(torch.nn.Linear(3, 2), backend="aot_eager")
    armed = []
    for index in range(5):
        with backend.step(index):
            before = sync_levels[-1]
            compiled(torch.ones(1 + index // 4, 3))
            armed.append((before, sync_levels[-1]))
    backend.close()
    assert armed == [(2, 0), (0, 0), (2, 2), (2, 2), (2, 0)]


def test_with_compile_the_first_step_may_wait(sync_levels: list[int]) -> None:
    backend = CudaBackend(guard="error", compile=True)
    levels = []
    for index in range(2):
        with backend.step(index):
            levels.append(sync_levels[-1])
    backend.close()
    assert levels == [0, 2]


def test_the_guard_is_down_when_reads_are_delivered(sync_levels: list[int]) -> None:
    backend = CudaBackend(guard="error", lag=0)
    during: list[int] = []
    with backend.step(0):
        backend.read([torch.tensor(1.0)], lambda _: during.append(sync_levels[-1]))
    assert during == [0]


def test_the_guard_is_down_after_a_step_that_failed(sync_levels: list[int]) -> None:
    backend = CudaBackend(guard="error")
    with pytest.raises(ZeroDivisionError), backend.step(0):
        raise ZeroDivisionError
    assert sync_levels == [0, 2, 0]


@pytest.fixture
def no_workspace(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """CUDA's library as it is before it starts; CUDA itself is not there."""
    monkeypatch.setenv(WORKSPACE, "")  # so that it is restored
    monkeypatch.delenv(WORKSPACE)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(CudaBackend, "is_available", staticmethod(lambda kind=None: False))
    return monkeypatch


def open_deterministic() -> None:
    with pytest.raises(BackendUnavailable):  # later than what is looked at here
        CudaBackend(deterministic=True).open()


def test_deterministic_sets_cublas_workspace_before_cuda_starts(no_workspace: Any) -> None:
    open_deterministic()
    assert os.environ[WORKSPACE] == ":4096:8"


def test_with_several_processes_it_is_set_before_these_meet(no_workspace: Any) -> None:
    at_meeting: list[str | None] = []
    module = importlib.import_module("backends.parallel.backend")
    no_workspace.setattr(CudaBackend, "is_available", staticmethod(lambda kind=None: True))
    no_workspace.setattr(module, "join", lambda: at_meeting.append(os.environ.get(WORKSPACE)))
    given = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "::1", "MASTER_PORT": 29}
    for name, value in given.items():
        no_workspace.setenv(name, str(value))
    with pytest.raises(BackendError):  # there is no other process
        make_backend("cuda", {"deterministic": True}).open()
    assert at_meeting == [":4096:8"]


def test_deterministic_keeps_a_workspace_that_fits(no_workspace: Any) -> None:
    no_workspace.setenv(WORKSPACE, ":16:8")
    open_deterministic()
    assert os.environ[WORKSPACE] == ":16:8"


def test_deterministic_refuses_a_workspace_that_does_not_fit(no_workspace: Any) -> None:
    no_workspace.setenv(WORKSPACE, ":0:0")
    with pytest.raises(BackendError, match=f"{WORKSPACE} is ':0:0'. Start the program with"):
        CudaBackend(deterministic=True).open()


def test_deterministic_too_late_is_refused(no_workspace: Any) -> None:
    no_workspace.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(BackendError, match=r"is not set and CUDA has started"):
        CudaBackend(deterministic=True).open()


def test_rocm_needs_no_workspace(no_workspace: Any) -> None:
    no_workspace.setattr(torch.version, "hip", "7.0")
    open_deterministic()
    assert WORKSPACE not in os.environ


@pytest.mark.cuda
@needs_cuda
def test_a_read_in_the_step_is_warned_of_and_nothing_else(open_backend: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend = open_backend("cuda")
        value = torch.ones((), device=backend.device)
        with backend.step(0):
            value.add_(1)
    with pytest.warns(UserWarning, match=r"synchronizing"), backend.step(1):
        value.item()


@pytest.mark.cuda
@needs_cuda
def test_a_whole_step_in_half_precision_waits_for_nothing() -> None:
    backend = make_backend("cuda", {"guard": "error"})
    backend.open()
    model = backend.prepare_model(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1)))
    optimizer = backend.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    scaler = backend.grad_scaler()
    assert scaler is not None
    losses: list[float] = []
    for index, batch in enumerate(backend.batches([torch.ones(4, 8)] * 6)):
        with backend.step(index):
            with backend.autocast(torch.float16):
                loss = model(batch).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            backend.norms.clip_grad_norm(list(model.parameters()), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            backend.read([loss], losses.extend)
    backend.flush()
    backend.close()
    assert len(losses) == 6
    assert backend.counters()["transfers"] == 6
