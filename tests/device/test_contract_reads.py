"""What every backend promises of reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from backends import Backend

Make = Callable[..., Backend]


def test_a_read_has_the_values_of_its_time(valued: Backend) -> None:
    seen: list[Any] = []
    with valued.step(0):
        value = torch.arange(3.0, device=valued.device)
        valued.read([value.sum(), value, value.sum().int(), value > 1], seen.extend)
        value.mul_(10)
    valued.flush()
    number, tensor, integer, flags = seen
    assert (number, integer) == (3.0, 3)
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    assert flags.tolist() == [False, False, True]
    assert tensor.device.type == "cpu"


def test_a_single_value_may_be_changed_after_its_read(valued: Backend) -> None:
    seen: list[Any] = []
    value = torch.ones((), device=valued.device)
    with valued.step(0):
        valued.read([value], seen.extend)
        value.add_(1)
    valued.flush()
    assert seen == [1.0]


def test_reads_of_a_step_keep_their_values_apart(valued: Backend) -> None:
    seen: list[Any] = []
    ones = torch.ones(2, 2, device=valued.device)
    with valued.step(0):
        valued.read([ones.sum(), ones], lambda values: seen.append(values[0]))
        valued.read([ones * 2, ones.sum() * 2], lambda values: seen.append(values[0].tolist()))
        valued.read([], seen.append)
        valued.read([torch.tensor(7)], lambda values: seen.append(values[0]))
    valued.flush()
    assert seen == [4.0, [[2.0, 2.0], [2.0, 2.0]], [], 7]


def test_reads_that_were_forgotten_are_not_delivered(open_backend: Make) -> None:
    backend = open_backend("fake")
    seen: list[Any] = []
    for value in (1.0, 2.0):
        with backend.step(0):
            backend.read([torch.tensor(value)], seen.extend)
    backend.read([torch.tensor(3.0)], seen.extend)
    backend.reads.clear()
    assert backend.reads.is_empty
    with backend.step(2):
        backend.read([torch.tensor(4.0)], seen.extend)
    backend.flush()
    assert seen == [4.0]


def test_reads_are_forgotten_when_a_delivery_has_failed(open_backend: Make) -> None:
    backend = open_backend("fake")
    seen: list[Any] = []

    def fail(values: list[Any]) -> None:
        raise ZeroDivisionError

    with backend.step(0):
        backend.read([torch.tensor(1.0)], fail)
        backend.read([torch.tensor(2.0)], seen.extend)
    with pytest.raises(ZeroDivisionError):
        backend.flush()
    backend.reads.clear()
    backend.flush()
    assert seen == []


def test_a_read_of_a_tensor_with_a_graph_is_delivered_without_it(valued: Backend) -> None:
    seen: list[Any] = []
    with valued.step(0):
        valued.read([torch.ones(2, device=valued.device, requires_grad=True) * 2], seen.extend)
    valued.flush()
    assert not seen[0].requires_grad
    assert seen[0].tolist() == [2.0, 2.0]


def test_a_read_under_autocast_keeps_its_dtype(valued: Backend) -> None:
    seen: list[Any] = []
    halves = torch.full((2,), 2049.0, device=valued.device, dtype=torch.float16)
    with valued.step(0), valued.autocast(torch.bfloat16):
        valued.read([halves, halves], seen.extend)
    valued.flush()
    assert [tensor.dtype for tensor in seen] == [torch.float16, torch.float16]


def test_reads_are_delivered_in_order_and_the_lag_late(kind: str, open_backend: Make) -> None:
    backend = open_backend(kind, lag=2)
    seen: list[int] = []
    counts = []
    for index in range(4):
        with backend.step(index):
            value = torch.zeros((), device=backend.device)
            backend.read([value], lambda values, index=index: seen.append(index))  # type: ignore[misc]
        counts.append(len(seen))
    assert counts == [0, 0, 1, 2]
    backend.flush()
    assert seen == [0, 1, 2, 3]


def test_without_lag_a_read_is_delivered_at_the_end_of_its_step(
    kind: str, open_backend: Make
) -> None:
    backend = open_backend(kind, lag=0)
    seen: list[Any] = []
    with backend.step(0):
        backend.read([torch.zeros((), device=backend.device)], seen.extend)
        inside = list(seen)
    assert (inside, seen) == ([], [0.0])


def test_a_flush_delivers_what_deliveries_read(kind: str, open_backend: Make) -> None:
    backend = open_backend(kind, lag=2)
    seen: list[Any] = []

    def again(values: list[Any]) -> None:
        seen.append("first")
        backend.read([torch.zeros((), device=backend.device)], lambda _: seen.append("second"))

    with backend.step(0):
        backend.read([torch.zeros((), device=backend.device)], again)
    backend.flush()
    assert seen == ["first", "second"]


def test_an_error_in_a_delivery_loses_no_other(kind: str, open_backend: Make) -> None:
    backend = open_backend(kind, lag=2)
    seen: list[int] = []

    def fail(values: list[Any]) -> None:
        raise KeyError("loss")

    with backend.step(0):
        value = torch.zeros((), device=backend.device)
        backend.read([value], lambda _: seen.append(0))
        backend.read([value], fail)
        backend.read([value], lambda _: seen.append(1))
    with backend.step(1):
        backend.read([value], lambda _: seen.append(2))
    with pytest.raises(KeyError, match=r"loss"):
        backend.flush()
    assert seen == [0]
    backend.flush()
    assert seen == [0, 1, 2]


def test_a_step_that_failed_delivers_later(kind: str, open_backend: Make) -> None:
    backend = open_backend(kind, lag=0)
    seen: list[Any] = []

    def fail() -> None:
        backend.read([torch.zeros((), device=backend.device)], seen.extend)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), backend.step(0):
        fail()
    assert seen == []
    assert not backend.in_step
    backend.flush()
    assert seen == [0.0]


def test_a_read_on_the_host_inside_a_step_raises(guarded_kind: str, open_backend: Make) -> None:
    options = {"guard": "error"} if guarded_kind == "cuda" else {}
    backend = open_backend(guarded_kind, **options)
    value = torch.ones((), device=backend.device)
    with pytest.raises(RuntimeError), backend.step(0):
        value.item()
    with backend.step(1):
        seen: list[Any] = []
        backend.read([value], seen.extend)
    backend.flush()
    assert len(seen) == 1


def test_a_read_on_the_host_after_a_step_is_fine(valued: Backend) -> None:
    value = torch.ones((), device=valued.device)
    with valued.step(0):
        value.add_(1)
    assert value.item() == 2.0
