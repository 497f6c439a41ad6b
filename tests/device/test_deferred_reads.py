"""Deferred reads: how they are grouped, and what a device does for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.reads import DeferredReads, HostCopies

CPU = torch.device("cpu")


class LateCopies(HostCopies):
    """Copies that are empty until they are waited for."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.waits = 0

    def start(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        self.num_transfers += 1
        target = torch.zeros_like(tensor)

        def wait() -> None:
            self.waits += 1
            target.copy_(tensor)

        return target, wait


def test_a_step_makes_one_transfer_for_each_dtype() -> None:
    reads = DeferredReads(0, HostCopies(CPU))
    seen: list[Any] = []
    for value in range(5):
        reads.put([torch.tensor(float(value)), torch.tensor(value)], seen.extend)
    reads.end_group()
    assert reads.copies.num_transfers == 2
    assert reads.num_reads == 5
    assert seen == [0.0, 0, 1.0, 1, 2.0, 2, 3.0, 3, 4.0, 4]


def test_a_step_without_reads_makes_no_transfer() -> None:
    reads = DeferredReads(0, HostCopies(CPU))
    reads.end_group()
    assert reads.copies.num_transfers == 0


def test_a_transfer_is_waited_for_when_it_is_due_and_not_before() -> None:
    copies = LateCopies()
    reads = DeferredReads(2, copies)
    seen: list[Any] = []
    reads.put([torch.tensor(3.0)], seen.extend)
    reads.end_group()
    reads.end_group()
    assert (copies.num_transfers, copies.waits, seen) == (1, 0, [])
    reads.end_group()
    assert (copies.waits, seen) == (1, [3.0])


def test_shapes_survive_the_packing() -> None:
    reads = DeferredReads(0, HostCopies(CPU))
    seen: list[Any] = []
    matrix = torch.arange(6).view(2, 3)
    reads.put([matrix.t(), torch.zeros(0, 3, dtype=torch.int64), matrix[0, 1]], seen.extend)
    reads.put([matrix], seen.extend)
    reads.end_group()
    assert seen[0].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert seen[1].shape == (0, 3)
    assert seen[2] == 1
    assert seen[3].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_delivered_tensor_is_the_receivers_own() -> None:
    reads = DeferredReads(0, HostCopies(CPU))
    seen: list[Any] = []
    value = torch.ones(2)
    reads.put([value, value], seen.extend)
    reads.end_group()
    seen[0].zero_()
    assert value.tolist() == [1.0, 1.0]
    assert seen[1].tolist() == [1.0, 1.0]


def test_a_host_tensor_is_read_as_it_is_at_once() -> None:
    reads = DeferredReads(0, HostCopies(torch.device("meta")))
    seen: list[Any] = []
    value = torch.tensor(2.0)
    reads.put([value], seen.extend)
    value.add_(1)
    reads.end_group()
    assert seen == [2.0]
    assert reads.copies.num_transfers == 0


def test_an_asynchronous_copy_is_marked_by_an_event_and_waited_for_through_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    empty = torch.empty

    class Event:
        def __init__(self, device: torch.device) -> None:
            log.append(f"event on {device}")

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

    def pinned(shape: torch.Size, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        log.append(f"pinned {pin_memory}")
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "empty", pinned)
    copies = HostCopies(CPU)
    monkeypatch.setattr(copies, "_is_async", True)
    reads = DeferredReads(1, copies)
    seen: list[Any] = []
    reads.put([torch.tensor(3.0)], seen.extend)
    reads.end_group()
    assert log == ["pinned True", "event on cpu", "record"]
    reads.end_group()
    assert log[3:] == ["wait"]
    assert seen == [3.0]
