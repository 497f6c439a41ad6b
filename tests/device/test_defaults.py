"""Defaults that follow precision and sharding, and what a start says about speed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from backends import speed
from backends.blocks import CompileOptions, compile_model
from backends.cpu import CpuBackend
from backends.cuda import CudaBackend
from backends.parallel.config import ParallelSettings
from modelzoo_trainer.checkpointing.background import BackgroundSaver
from modelzoo_trainer.loading.epochs import pin_in_thread

HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("given", "autocast", "model", "expected"),
    [
        ({}, HALF, nn.Linear(2, 2), (HALF, FULL)),
        ({"reduce_dtype": HALF}, HALF, nn.Linear(2, 2), (HALF, HALF)),
        ({"param_dtype": FULL}, HALF, nn.Linear(2, 2), (FULL, None)),
        ({}, None, nn.Linear(2, 2), (None, None)),
        ({}, torch.float16, nn.Linear(2, 2), (None, None)),
        ({}, HALF, nn.Linear(2, 2).double(), (None, None)),
    ],
)
def test_sharded_parameters_are_gathered_in_the_type_of_the_computation(
    given: dict[str, Any], autocast: torch.dtype | None, model: nn.Module, expected: Any
) -> None:
    settings = ParallelSettings(**given).with_dtypes(autocast, model)
    assert (settings.param_dtype, settings.reduce_dtype) == expected


@pytest.mark.parametrize(
    ("target", "is_sharded", "has_blocks", "compiled"),
    [
        (None, False, True, "model"),
        (None, True, True, "blocks"),
        (None, True, False, "model"),
        ("model", True, True, "model"),
        ("blocks", False, True, "blocks"),
    ],
)
def test_a_sharded_model_is_compiled_block_by_block(
    target: Any, is_sharded: bool, has_blocks: bool, compiled: str
) -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    model = nn.Sequential(nn.ModuleList(layers) if has_blocks else nn.Identity())
    compile_model(model, CompileOptions(target=target, backend="eager"), is_sharded=is_sharded)
    found = {
        "model": model._compiled_call_impl is not None,
        "blocks": all(layer._compiled_call_impl is not None for layer in layers),
    }
    assert found == {"model": compiled == "model", "blocks": compiled == "blocks"}


@pytest.mark.parametrize(
    ("pins", "num_workers", "expected"), [(True, 2, True), (True, 0, False), (False, 2, False)]
)
def test_workers_of_a_loader_have_a_thread_that_pins(
    pins: bool, num_workers: int, expected: bool
) -> None:
    loader: DataLoader[Any] = DataLoader([1, 2], num_workers=num_workers)  # type: ignore[arg-type]
    pin_in_thread(loader, SimpleNamespace(caps=SimpleNamespace(pins=pins)))  # type: ignore[arg-type]
    assert loader.pin_memory is expected


@pytest.mark.parametrize("pins", [True, False])
def test_a_save_of_several_ranks_copies_to_pinned_memory(
    pins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed.checkpoint.staging as staging

    made: list[Any] = []
    stager = SimpleNamespace(stage=lambda state: state)
    monkeypatch.setattr(staging, "DefaultStager", lambda given: made.append(given) or stager)
    monkeypatch.setattr("modelzoo_trainer.checkpointing.background.can_pin", lambda: pins)
    BackgroundSaver()._staged({"a": torch.ones(1)})
    assert [(one.use_pinned_memory, one.use_non_blocking_copy) for one in made] == [(pins, pins)]


# ---- what the start says


def cuda(monkeypatch: pytest.MonkeyPatch, **options: Any) -> CudaBackend:
    """Return a backend of a H100 that is not there."""
    name = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr("backends.peak_rates.device_name", lambda backend: name)
    for flag in ("is_flash_attention_available", "flash_sdp_enabled"):
        monkeypatch.setattr(torch.backends.cuda, flag, lambda: True)
    return CudaBackend(**options)


def test_float32_without_tf32_is_said_and_what_would_be_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = cuda(monkeypatch)
    assert speed.speed_of(backend, FULL) == (
        "matrix products in float32 without TF32, memory-efficient attention, not compiled"
    )
    advice = speed.faster_than(backend, FULL)
    assert "precision: {fp16_type: bfloat16}" in advice
    assert "up to 15 times" in advice
    assert "backend.matmul_precision: high" in advice


def test_bfloat16_is_said_and_nothing_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = cuda(monkeypatch, compile=True)
    assert speed.speed_of(backend, HALF) == (
        "matrix products in bfloat16, flash attention, compiled"
    )
    assert speed.faster_than(backend, HALF) == ""


def test_the_host_has_no_such_line() -> None:
    assert speed.speed_of(CpuBackend(), FULL) == ""


@pytest.mark.parametrize(
    ("has_bfloat16", "dtype", "is_slow"),
    [(False, HALF, True), (True, HALF, False), (False, FULL, False)],
)
def test_bfloat16_on_a_cpu_that_has_no_instructions_for_it(
    has_bfloat16: bool, dtype: torch.dtype, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"architecture": "x86_64", "avx512_bf16": has_bfloat16}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert ("precision.enabled: false" in speed.faster_than(CpuBackend(), dtype)) == is_slow
