"""The fake device: what its guard refuses and what it lets pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backends import HostReadError
from backends.fake import FakeBackend

VALUE = torch.tensor(1.5)
INDEX = torch.tensor(1)
MATRIX = torch.arange(6.0).view(2, 3)
MASK = MATRIX > 2

READS: dict[str, Callable[[], Any]] = {
    "Tensor.item": lambda: VALUE.item(),
    "Tensor.tolist": lambda: MATRIX.tolist(),
    "Tensor.numpy": lambda: MATRIX.numpy(),
    "Tensor.__array__": lambda: np.asarray(MATRIX),
    "Tensor.__bool__": lambda: bool(VALUE > 1),
    "Tensor.__float__": lambda: float(VALUE),
    "Tensor.__int__": lambda: int(VALUE),
    "Tensor.__index__": lambda: range(INDEX),  # type: ignore[call-overload]
    "Tensor.__contains__": lambda: 1.0 in MATRIX,
    "Tensor.__repr__": lambda: str(MATRIX),
    "Tensor.__format__": lambda: f"{VALUE:.2f}",
    "Tensor.cpu": lambda: MATRIX.cpu(),
    "Tensor.to": lambda: MATRIX.to("cpu"),
    "Tensor.to ": lambda: MATRIX.to(device="cpu"),
    "Tensor.nonzero": lambda: MATRIX.nonzero(),
    "torch.nonzero": lambda: torch.nonzero(MATRIX),
    "torch.argwhere": lambda: torch.argwhere(MATRIX),
    "torch.where": lambda: torch.where(MASK),
    "Tensor.masked_select": lambda: MATRIX.masked_select(MASK),
    "Tensor.__getitem__": lambda: MATRIX[MASK],
    "Tensor.__getitem__ ": lambda: MATRIX[0, MASK[0]],
    "Tensor.__getitem__  ": lambda: MATRIX[INDEX],
    "Tensor.__setitem__": lambda: MATRIX.clone().__setitem__(MASK, torch.zeros(3)),
    "torch.equal": lambda: torch.equal(MATRIX, MATRIX),
    "torch.allclose": lambda: torch.allclose(MATRIX, MATRIX),
    "Tensor.is_nonzero": lambda: VALUE.is_nonzero(),
    "Tensor.unique": lambda: INDEX.unique(),
    "unique": lambda: torch.unique(INDEX),
    "Tensor.repeat_interleave": lambda: MATRIX.repeat_interleave(torch.tensor([1, 2]), 0),
    "torch.tensor": lambda: torch.tensor([VALUE, VALUE]),
    "one_hot": lambda: nn.functional.one_hot(INDEX),
}

KEEPS_ON_THE_DEVICE: dict[str, Callable[[], Any]] = {
    "where": lambda: torch.where(MASK, MATRIX, 0.0),
    "masked fill": lambda: MATRIX.masked_fill(MASK, 0.0),
    "mask assignment of one value": lambda: MATRIX.clone().__setitem__(MASK, 0.0),
    "index by integers": lambda: MATRIX[:, torch.tensor([0, 2])],
    "index by numbers": lambda: MATRIX[1, 2:],
    "to the device of another": lambda: MATRIX.to(VALUE.device),
    "to a dtype": lambda: MATRIX.to(torch.bfloat16),
    "repeat to a known size": lambda: torch.repeat_interleave(INDEX.view(1), 3),
    "one hot of a known size": lambda: nn.functional.one_hot(INDEX, 4),
    "shape": lambda: (MATRIX.shape, len(MATRIX), MATRIX.numel()),
    "isfinite": lambda: torch.isfinite(MATRIX).all(),
    "deepcopy": lambda: copy.deepcopy(MATRIX),
    "iterate": lambda: [row.sum() for row in MATRIX],
    "clip": lambda: nn.utils.clip_grad_norm_([nn.Parameter(MATRIX)], 1.0),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_inside_the_step_is_refused_by_name(name: str) -> None:
    backend = FakeBackend()
    with (
        pytest.raises(HostReadError, match=f"{name.strip()} reads the value of a tensor"),
        backend.step(0),
    ):
        READS[name]()
    assert backend.counters()["host_reads"] == 1


@pytest.mark.parametrize("name", READS)
def test_the_same_read_after_the_step_is_not_refused(name: str) -> None:
    backend = FakeBackend()
    with backend.step(0):
        pass
    READS[name]()
    assert backend.counters()["host_reads"] == 0


@pytest.mark.parametrize("name", KEEPS_ON_THE_DEVICE)
def test_what_stays_on_the_device_is_let_pass(name: str) -> None:
    backend = FakeBackend()
    with backend.step(0):
        KEEPS_ON_THE_DEVICE[name]()
    assert backend.counters()["host_reads"] == 0


def test_the_error_names_the_line_that_read() -> None:
    message = r"Tensor\.item .*test_fake\.py:\d+,"
    with pytest.raises(HostReadError, match=message), FakeBackend().step(0):
        VALUE.item()


def test_a_read_inside_a_model_is_found_at_the_models_line() -> None:
    class Peeking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    message = r"Tensor.__bool__ .* at .*test_fake\.py:\d+"
    with pytest.raises(HostReadError, match=message), FakeBackend().step(0):
        Peeking()(MATRIX)


def test_the_guard_is_down_after_a_step_that_failed() -> None:
    backend = FakeBackend()
    with pytest.raises(ZeroDivisionError), backend.step(0):
        raise ZeroDivisionError
    assert VALUE.item() == 1.5


def test_deliveries_may_read() -> None:
    backend = FakeBackend(lag=0)
    seen: list[float] = []
    with backend.step(0):
        backend.read([MATRIX], lambda values: seen.append(values[0].sum().item()))
    assert seen == [15.0]


def test_the_optimizers_and_the_scalers_own_reads_are_let_pass() -> None:
    backend = FakeBackend()
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    scaler = backend.grad_scaler(init_scale=4.0)
    assert scaler is not None
    with backend.step(0):
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        backend.norms.clip_grad_norm([weight], 9.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    with backend.step(1):
        weight.sum().backward()
        backend.optimizer_step(optimizer)
    assert weight.tolist() == pytest.approx([0.8, 0.8], abs=1e-4)


def test_an_optimizer_called_directly_is_not_the_backends_business() -> None:
    backend = FakeBackend()
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    weight.sum().backward()
    with pytest.raises(HostReadError), backend.step(0):
        optimizer.step()


def test_numbers_are_those_of_the_cpu(open_backend: Any) -> None:
    def run(kind: str) -> list[float]:
        backend = open_backend(kind)
        torch.manual_seed(0)
        model = backend.prepare_model(nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 1)))
        optimizer = backend.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        losses: list[float] = []
        for index, batch in enumerate(backend.batches([MATRIX] * 6)):
            with backend.step(index):
                loss = model(batch).square().mean()
                loss.backward()
                backend.optimizer_step(optimizer)
                optimizer.zero_grad()
                backend.read([loss], losses.extend)
        backend.flush()
        return losses

    assert run("fake") == run("cpu")


def test_counters_say_what_was_read_and_brought() -> None:
    backend = FakeBackend()
    for index in range(3):
        with backend.step(index):
            backend.read([VALUE], list)
            backend.read([VALUE, MATRIX], list)
    backend.flush()
    assert backend.counters() == {"host_reads": 0, "reads": 6, "transfers": 3}


def test_a_batch_on_the_device_is_not_the_loaders() -> None:
    source = torch.ones(2)
    (batch,) = FakeBackend().batches([source])
    batch.zero_()
    assert source.tolist() == [1.0, 1.0]
