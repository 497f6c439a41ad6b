"""Reads that come in batches: when they are fetched, together with what, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.xla.reads import BatchedReads

MANY = 1 << 20


class Device:
    """A device of type "cpu" whose transfers are written down."""

    def __init__(self) -> None:
        self.fetches: list[list[Tensor]] = []

    def fetch(self, snapshots: list[Tensor]) -> list[Tensor]:
        self.fetches.append(snapshots)
        return snapshots

    @property
    def sizes(self) -> list[int]:
        return [len(snapshots) for snapshots in self.fetches]


def reads_of(device: Device, lag: int = 100, kind: str = "cpu") -> BatchedReads:
    return BatchedReads(lag, torch.clone, device.fetch, kind)


def put(reads: BatchedReads, deliver: Callable[[list[Any]], None], *values: float) -> None:
    reads.put([torch.tensor(float(value)) for value in values], deliver)


def step(reads: BatchedReads, deliver: Callable[[list[Any]], None], *values: float) -> None:
    """Take a step that reads some values."""
    for value in values:
        put(reads, deliver, value)
    reads.end_group()


def refuse(values: list[Any]) -> None:
    raise LookupError(f"refused {values}")


def test_nothing_is_fetched_while_nobody_is_in_a_hurry() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    for value in range(50):
        step(reads, seen.extend, value)
    assert (seen, device.sizes) == ([], [])
    assert not reads.is_empty


def test_a_hurry_brings_all_that_was_read_in_one_transfer_a_step_later() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    step(reads, seen.extend, 1)
    step(reads, seen.extend, 2, 3)
    put(reads, seen.extend, 4)
    reads.expedite()
    reads.end_group()
    assert (seen, device.sizes) == ([], [])
    step(reads, seen.extend, 5)
    assert (seen, device.sizes) == ([1.0, 2.0, 3.0, 4.0], [4])


def test_a_hurry_between_steps_waits_for_the_next_one_alone() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    step(reads, seen.extend, 1)
    step(reads, seen.extend, 2)
    reads.expedite()
    assert seen == []
    step(reads, seen.extend, 3)
    assert (seen, device.sizes) == ([1.0, 2.0], [2])


def test_what_is_read_after_a_hurry_waits_for_the_next_one() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    step(reads, seen.extend, 1)
    reads.expedite()
    for value in (2, 3, 4):
        step(reads, seen.extend, value)
    assert (seen, device.sizes) == ([1.0], [1])
    reads.expedite()
    step(reads, seen.extend, 5)
    assert (seen, device.sizes) == ([1.0, 2.0, 3.0, 4.0], [1, 3])


def test_two_hurries_are_one_transfer() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    put(reads, seen.extend, 1)
    reads.expedite()
    reads.expedite()
    reads.end_group()
    step(reads, seen.extend, 2)
    step(reads, seen.extend, 3)
    assert (seen, device.sizes) == ([1.0], [1])


def test_a_hurry_every_other_step_is_a_transfer_every_other_step() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    for value in range(8):
        put(reads, seen.extend, value)
        if value % 2 == 0:
            reads.expedite()
        reads.end_group()
    assert device.sizes == [1, 2, 2, 2]
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_hurry_for_nothing_fetches_nothing() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    reads.expedite()
    for value in (1, 2, 3):
        step(reads, seen.extend, value)
    assert (seen, device.sizes) == ([], [])


def test_without_a_hurry_values_come_when_the_oldest_is_as_old_as_the_lag() -> None:
    device, arrived = Device(), {}
    reads = reads_of(device, lag=5)
    for now in range(1, 14):
        put(reads, lambda values: arrived.setdefault(int(values[0]), now), now)  # noqa: B023
        reads.end_group()
    assert arrived == {1: 6, 2: 6, 3: 6, 4: 6, 5: 6, 6: 11, 7: 11, 8: 11, 9: 11, 10: 11}
    assert device.sizes == [5, 5]


def test_a_hurry_in_the_step_that_the_lag_ends_with_is_not_forgotten() -> None:
    device, seen = Device(), []
    reads = reads_of(device, lag=3)
    for value in (1, 2, 3):
        step(reads, seen.extend, value)
    put(reads, seen.extend, 4)
    reads.expedite()
    reads.end_group()
    assert seen == [1.0, 2.0, 3.0]
    step(reads, seen.extend, 5)
    assert (seen, device.sizes) == ([1.0, 2.0, 3.0, 4.0], [3, 1])


def test_steps_without_reads_count_for_the_lag_and_cost_no_transfer() -> None:
    device, seen = Device(), []
    reads = reads_of(device, lag=4)
    step(reads, seen.extend, 1)
    for _ in range(3):
        reads.end_group()
    assert seen == []
    for _ in range(20):
        reads.end_group()
    assert (seen, device.sizes) == ([1.0], [1])


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_short_lag_is_kept_to_the_step(lag: int) -> None:
    device, arrived = Device(), {}
    reads = reads_of(device, lag=lag)
    for now in range(6):
        put(reads, lambda values: arrived.setdefault(int(values[0]), now), now)  # noqa: B023
        reads.end_group()
    assert arrived == {value: value + lag for value in range(6 - lag)}
    assert device.sizes == [1] * (6 - lag)


def test_a_short_lag_is_kept_in_a_hurry_as_well() -> None:
    device, seen = Device(), []
    reads = reads_of(device, lag=2)
    put(reads, seen.extend, 1)
    reads.expedite()
    reads.end_group()
    step(reads, seen.extend, 2)
    assert seen == []
    reads.end_group()
    assert seen == [1.0]


def test_each_read_is_delivered_once_and_in_order() -> None:
    device, seen = Device(), []
    reads = reads_of(device, lag=7)
    value = 0
    for number in range(60):
        for _ in range(number % 3):
            put(reads, seen.append, value, -value)
            value += 1
        if number % 5 == 0:
            reads.expedite()
        reads.end_group()
    reads.flush()
    assert seen == [[float(number), float(-number)] for number in range(60)]
    assert reads.num_reads == 60
    assert sum(device.sizes) == 120


def test_a_read_is_of_the_value_at_its_time() -> None:
    seen: list[Any] = []
    reads = reads_of(Device())
    value = torch.tensor(2.0)
    reads.put([value], seen.extend)
    value.add_(1)
    reads.end_group()
    reads.flush()
    assert seen == [2.0]


def test_numbers_arrive_for_tensors_without_dimensions_and_copies_for_others() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    reads.put([torch.tensor(3), torch.tensor([1.5, 2.5]), torch.tensor(True)], seen.extend)
    reads.flush()
    assert seen[0] == 3
    assert seen[1].tolist() == [1.5, 2.5]
    assert seen[2] is True
    seen[1].zero_()
    assert device.fetches[0][1].tolist() == [1.5, 2.5]


def test_a_flush_brings_everything_in_one_transfer() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    step(reads, seen.extend, 1)
    step(reads, seen.extend, 2)
    put(reads, seen.extend, 3)
    reads.flush()
    assert (seen, device.sizes) == ([1.0, 2.0, 3.0], [3])
    assert reads.is_empty


def test_a_flush_takes_the_hurry_away() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    put(reads, seen.extend, 1)
    reads.expedite()
    reads.flush()
    for value in (2, 3, 4):
        step(reads, seen.extend, value)
    assert (seen, device.sizes) == ([1.0], [1])


def test_a_flush_of_nothing_fetches_nothing() -> None:
    device = Device()
    reads_of(device).flush()
    assert device.sizes == []


def test_many_elements_are_not_held_back() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    reads.put([torch.zeros(MANY)], lambda values: seen.append("many"))
    reads.end_group()
    reads.end_group()
    assert seen == []
    step(reads, lambda values: seen.append("one more"), 1)
    assert (seen, device.sizes) == (["many"], [1])
    step(reads, lambda values: seen.append("last"), 1)
    assert seen == ["many"]


def test_values_on_the_host_are_taken_at_once_and_cost_no_transfer() -> None:
    device, seen = Device(), []
    reads = reads_of(device, kind="meta")
    value = torch.ones(2)
    reads.put([value, torch.tensor(7)], seen.extend)
    value.zero_()
    reads.flush()
    assert seen[0].tolist() == [1.0, 1.0]
    assert seen[1] == 7
    assert (device.sizes, reads.num_reads, reads.num_transfers) == ([], 1, 0)


def test_values_of_host_and_device_arrive_in_the_order_of_their_tensors() -> None:
    seen: list[Any] = []
    reads = BatchedReads(
        9, lambda tensor: "known to the device", lambda _: [torch.tensor(2)], "meta"
    )
    reads.put([torch.tensor(1), torch.zeros((), device="meta"), torch.tensor(3)], seen.extend)
    reads.flush()
    assert seen == [1, 2, 3]


def test_large_values_on_the_host_do_not_count_for_the_device() -> None:
    device, seen = Device(), []
    reads = reads_of(device, kind="meta")
    reads.put([torch.zeros(MANY + 1)], lambda values: seen.append("many"))
    reads.end_group()
    reads.end_group()
    assert seen == []


def test_reads_and_transfers_are_counted() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    step(reads, seen.extend, 1, 2)
    put(reads, seen.extend, 3, 4)
    reads.flush()
    step(reads, seen.extend, 5)
    reads.flush()
    reads.flush()
    assert (reads.num_reads, reads.num_transfers) == (4, 2)
    assert device.sizes == [4, 1]


# ---- errors


def test_an_error_in_a_delivery_loses_no_other() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    step(reads, seen.extend, 1)
    put(reads, seen.extend, 2)
    put(reads, refuse, 3)
    put(reads, seen.extend, 4)
    reads.end_group()
    step(reads, seen.extend, 5)
    with pytest.raises(LookupError, match=r"refused \[3.0\]"):
        reads.flush()
    assert seen == [1.0, 2.0]
    assert not reads.is_empty
    reads.flush()
    assert (seen, device.sizes) == ([1.0, 2.0, 4.0, 5.0], [5])
    assert reads.is_empty


def test_after_an_error_reads_go_on_as_before() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    put(reads, refuse, 1)
    put(reads, seen.extend, 2)
    reads.expedite()
    reads.end_group()
    with pytest.raises(LookupError):
        step(reads, seen.extend, 3)
    reads.expedite()
    step(reads, seen.extend, 4)
    assert (seen, device.sizes) == ([2.0, 3.0], [2, 1])
    step(reads, seen.extend, 5)
    assert seen == [2.0, 3.0]


def test_an_error_of_the_device_loses_nothing() -> None:
    device, seen = Device(), []
    is_gone = True

    def fetch(snapshots: list[Tensor]) -> list[Tensor]:
        if is_gone:
            raise RuntimeError("the device is gone")
        return device.fetch(snapshots)

    reads = BatchedReads(9, torch.clone, fetch, "cpu")
    step(reads, seen.extend, 1)
    step(reads, seen.extend, 2)
    with pytest.raises(RuntimeError, match="the device is gone"):
        reads.flush()
    is_gone = False
    reads.flush()
    assert (seen, device.sizes) == ([1.0, 2.0], [2])


# ---- deliveries that read


def test_what_a_delivery_reads_is_delivered_by_the_same_flush() -> None:
    device, seen = Device(), []
    reads = reads_of(device)

    def again(values: list[Any]) -> None:
        seen.extend(values)
        if values[0] < 3:
            put(reads, again, values[0] + 1)

    step(reads, again, 1)
    reads.flush()
    assert (seen, device.sizes) == ([1.0, 2.0, 3.0], [1, 1, 1])
    assert reads.is_empty


def test_what_a_delivery_reads_within_a_run_is_part_of_the_step_at_hand() -> None:
    device, seen = Device(), []
    reads = reads_of(device)

    def again(values: list[Any]) -> None:
        seen.extend(values)
        put(reads, seen.extend, 10)

    put(reads, again, 1)
    reads.expedite()
    reads.end_group()
    step(reads, seen.extend, 2)
    assert (seen, reads.is_empty) == ([1.0], False)
    reads.expedite()
    step(reads, seen.extend, 3)
    assert seen == [1.0]
    reads.end_group()
    assert (seen, device.sizes) == ([1.0, 2.0, 10.0, 3.0], [1, 3])


def test_a_delivery_that_flushes_gets_its_order_kept() -> None:
    device, seen = Device(), []
    reads = reads_of(device)

    def flushes(values: list[Any]) -> None:
        seen.extend(values)
        put(reads, seen.extend, 10)
        reads.flush()
        seen.append("flushed")

    step(reads, flushes, 1)
    step(reads, seen.extend, 2)
    reads.flush()
    assert seen == [1.0, "flushed", 2.0, 10.0]
    assert reads.is_empty


# ---- what is on the device


def test_clear_forgets_what_was_read_and_the_hurry() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    step(reads, seen.extend, 1)
    put(reads, seen.extend, 2)
    reads.expedite()
    reads.clear()
    assert reads.is_empty
    for value in (3, 4, 5):
        step(reads, seen.extend, value)
    assert (seen, device.sizes) == ([], [])
    reads.flush()
    assert (seen, device.sizes) == ([3.0, 4.0, 5.0], [3])


def test_clear_forgets_how_many_elements_there_were() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    reads.put([torch.zeros(MANY)], seen.extend)
    reads.clear()
    for value in (1, 2, 3):
        step(reads, seen.extend, value)
    assert (seen, reads._num_elements) == ([], 3)


def test_no_element_is_counted_when_none_is_there() -> None:
    device, seen = Device(), []
    reads = reads_of(device, lag=3)
    num_errors = 0
    for number in range(40):
        reads.put([torch.zeros(number), torch.tensor(1.0)], seen.extend)
        if number % 7 == 0:
            put(reads, refuse, number)
        if number % 4 == 0:
            reads.expedite()
        try:
            reads.end_group()
        except LookupError:
            num_errors += 1
    while not reads.is_empty:
        try:
            reads.flush()
        except LookupError:
            num_errors += 1
    assert (num_errors, len(seen)) == (6, 80)
    assert reads._num_elements == 0


def test_a_hurry_each_step_is_a_transfer_each_step() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    for value in range(5):
        put(reads, seen.extend, value)
        reads.expedite()
        reads.end_group()
    assert device.sizes == [1, 1, 1, 1]
    assert seen == [0.0, 1.0, 2.0, 3.0]


def test_a_hurry_between_steps_each_time_is_a_transfer_each_step() -> None:
    device, seen = Device(), []
    reads = reads_of(device)
    for value in range(5):
        reads.end_group()
        put(reads, seen.extend, value)
        reads.expedite()
    assert seen == [0.0, 1.0, 2.0]


def test_elements_of_a_transfer_that_failed_are_counted_until_it_succeeds() -> None:
    is_gone = True

    def fetch(snapshots: list[Tensor]) -> list[Tensor]:
        if is_gone:
            raise RuntimeError("the device is gone")
        return snapshots

    reads = BatchedReads(9, torch.clone, fetch, "cpu")
    step(reads, lambda values: None, 1, 2)
    with pytest.raises(RuntimeError, match="the device is gone"):
        reads.flush()
    assert (reads._num_elements, reads.num_transfers) == (2, 0)
    is_gone = False
    reads.flush()
    assert (reads._num_elements, reads.num_transfers) == (0, 1)
