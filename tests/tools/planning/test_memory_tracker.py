from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from modelzoo_trainer.base.devices import fake_world
from modelzoo_trainer.tools.planning.memory_tracker import MemoryKind, MemoryTracker


@pytest.fixture
def tracker() -> Iterator[MemoryTracker]:
    with ExitStack() as stack:
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        found = stack.enter_context(MemoryTracker(mode))
        stack.enter_context(found.following_sizes())
        yield found


def test_memory_is_that_of_tensors_which_live(tracker: MemoryTracker) -> None:
    first = torch.empty(256)
    second = torch.empty(1024)
    del first
    third = second.view(32, 32)

    assert tracker.held() == 4096
    assert tracker.peak().total == 5120
    assert third.shape == (32, 32)


def test_a_storage_that_is_resized_counts_as_it_is(tracker: MemoryTracker) -> None:
    tensor = torch.empty(1024)
    tensor.untyped_storage().resize_(0)

    assert tracker.held() == 0

    tensor.untyped_storage().resize_(8192)

    assert tracker.held() == 8192


def test_what_memory_is_for_may_be_said_later(tracker: MemoryTracker) -> None:
    model = nn.Linear(8, 4)
    loss = model(torch.ones(2, 8)).sum()
    loss.backward()
    tracker.label(model.parameters(), MemoryKind.PARAMETERS)
    tracker.label((param.grad for param in model.parameters()), MemoryKind.GRADIENTS)  # type: ignore[misc]

    peak = tracker.peak()

    assert peak.highest[MemoryKind.PARAMETERS] == (8 * 4 + 4) * 4
    assert peak.highest[MemoryKind.GRADIENTS] == (8 * 4 + 4) * 4
    assert peak.highest[MemoryKind.ACTIVATIONS] > 0
    assert sum(peak.parts.values()) == peak.total


def test_arithmetic_is_what_torch_counts(tracker: MemoryTracker) -> None:
    def step() -> None:
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
        model(torch.ones(4, 16)).sum().backward()

    step()
    counter = FlopCounterMode(display=False)
    with counter:
        step()

    assert tracker.flops == 2 * counter.get_total_flops() > 0


def test_a_value_that_is_read_is_zero_and_counted(tracker: MemoryTracker) -> None:
    assert torch.ones(3).sum().item() == 0.0
    assert bool(torch.ones(3).any()) is False
    assert tracker.num_host_reads == 2


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")  # torch 2.13
def test_what_a_collective_sends_is_that_of_a_ring() -> None:
    mode = FakeTensorMode()
    with fake_world(8), mode, MemoryTracker(mode) as tracker:
        whole, part = torch.empty(64), torch.empty(8)
        dist.all_reduce(whole)
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        dist.reduce_scatter_tensor(part, whole)

    found = {
        key: (one.num_calls, one.num_bytes, one.num_sent) for key, one in tracker.exchanges.items()
    }
    assert found == {
        ("all-reduce", 8): (1, 256, 448),
        ("all-gather", 8): (1, 256, 224),
        ("reduce-scatter", 8): (2, 512, 448),
    }


def test_one_process_has_nobody_to_send_to() -> None:
    with fake_world(1):
        assert not dist.is_initialized()


def test_the_process_is_alone_again_after_the_run_on_paper() -> None:
    apply, init = nn.Module._apply, nn.parallel.DistributedDataParallel.__init__
    with fake_world(4):
        assert dist.get_world_size() == 4
    assert not dist.is_initialized()
    assert nn.Module._apply is apply
    assert nn.parallel.DistributedDataParallel.__init__ is init


def test_attention_counts_on_the_host_too() -> None:
    states = torch.zeros(1, 2, 16, 8, requires_grad=True)
    tracker = MemoryTracker()
    with tracker:
        torch.nn.functional.scaled_dot_product_attention(
            states, states, states, is_causal=True
        ).sum().backward()

    assert tracker.flops == 7 * 2 * 2 * 16 * 16 * 8  # products of 16 x 8 x 16 for each of two heads
