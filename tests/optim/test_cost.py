"""The cost of a schedule's step in function calls, without waiting for a device."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from modelzoo_trainer.optim.composed import SequentialLR
from modelzoo_trainer.optim.decay import CosineDecayLR, LinearLR


def warm_up_and_decay(optimizer):
    members = [LinearLR(None, 0.0, 1e-3, 1000), CosineDecayLR(None, 1e-3, 1e-5, 10**8)]
    return SequentialLR(optimizer, members)


def calls_of(function):
    """Return the number of Python and of C functions called by one call."""
    counts = {"call": 0, "c_call": 0}

    def profile(frame, event, argument):
        if event in counts:
            counts[event] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return counts["call"], counts["c_call"] - 1  # without the call that ends the profile


@pytest.mark.parametrize("step", [10, 1000, 10_000_000])
def test_a_step_makes_a_handful_of_calls_however_far_the_run_is(sgd, step):
    schedule = warm_up_and_decay(sgd)
    schedule.last_step = step
    in_python, in_c = calls_of(schedule.step)
    assert in_python <= 5  # step, value, the member's value, its curve, writing
    assert in_c <= 2  # bisect, cos


def test_the_calls_of_a_step_do_not_grow_with_the_groups(sgd):
    few = calls_of(warm_up_and_decay(sgd).step)
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(50)]
    many = torch.optim.SGD([{"params": [param]} for param in params], lr=0.5)
    assert calls_of(warm_up_and_decay(many).step) == few


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_rate_in_a_tensor_is_filled_and_never_read(sgd):
    for group in sgd.param_groups:
        group["lr"] = torch.tensor(0.5)
    schedule = warm_up_and_decay(sgd)
    with Recorder() as recorder:
        schedule.step()
    assert recorder.seen == ["aten.fill_.Scalar"] * 2


def test_rates_in_numbers_do_not_touch_torch(sgd):
    schedule = warm_up_and_decay(sgd)
    with Recorder() as recorder:
        schedule.step()
    assert recorder.seen == []
