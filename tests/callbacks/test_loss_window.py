import math

import pytest
import torch

from backends.sync_guard import SyncGuard
from modelzoo_trainer.callbacks.step_guard import RecentLosses

GOOD, BAD = torch.tensor(False), torch.tensor(True)


def window(size=8, threshold=6.0):
    return RecentLosses(size, threshold, torch.device("cpu"), torch.float64)


def fill(own, values, bad=GOOD):
    for value in values:
        own.add(torch.tensor(value, dtype=torch.float64), bad)
    return own


def test_the_limit_is_the_median_and_so_many_robust_deviations():
    own = fill(window(9, 2.0), [3.0, 1.0, 2.0, 5.0, 4.0, 9.0, 8.0, 7.0, 6.0])
    assert own.limit().item() == pytest.approx(5.0 + 2.0 * 1.4826 * 2.0)


def test_there_is_no_limit_before_the_window_is_full():
    own = fill(window(), [float(value) for value in range(7)])
    assert own.limit().item() == math.inf
    assert fill(own, [7.0]).limit().item() < math.inf


def test_losses_that_are_all_the_same_have_no_limit():
    assert fill(window(), [2.0] * 8).limit().item() == math.inf


def test_an_outlier_hardly_moves_the_limit():
    usual = [1.0, 1.1, 0.9, 1.05, 0.95, 1.02, 0.98, 1.0]
    before = fill(window(), usual).limit().item()
    after = fill(window(), [*usual, 1e6]).limit().item()
    assert after < before * 1.5


def test_a_bad_loss_is_not_taken_in():
    own = fill(window(), [float(value) for value in range(8)])
    before = own.limit().item()
    fill(own, [math.nan, 1e9], bad=BAD)
    assert own.limit().item() == before


def test_the_oldest_loss_is_forgotten():
    own = fill(window(), [1e6] * 8 + [float(value) for value in range(8)])
    assert own.limit().item() == fill(window(), [float(value) for value in range(8)]).limit().item()


def test_nothing_is_read_on_the_host():
    guard = SyncGuard()
    guard.arm()
    try:
        fill(window(), [1.0] * 9).limit()
    finally:
        guard.disarm()
    assert guard.num_refused == 0


@pytest.mark.parametrize("size", [8, 12])
def test_a_window_that_was_saved_and_loaded_continues(size):
    first = fill(window(size), [float(value % 5) for value in range(10)])
    second = window(size)
    second.load_state_dict(first.state_dict())
    for own in (first, second):
        fill(own, [3.0, 4.0, 1.0])
    assert second.limit().item() == first.limit().item()


def test_a_window_of_another_size_takes_the_newest_losses():
    whole = fill(window(12), [float(value) for value in range(12)])
    smaller, larger = window(8), window(16)
    smaller.load_state_dict(whole.state_dict())
    larger.load_state_dict(whole.state_dict())
    assert smaller.state_dict()["losses"].tolist() == [float(value) for value in range(4, 12)]
    assert larger.limit().item() == math.inf
    assert larger.state_dict()["losses"][4:].tolist() == [float(value) for value in range(12)]
