"""How fast a run is, and what is left of it: on a clock that the test moves."""

from __future__ import annotations

import pytest

from modelzoo_trainer.loggers.console.pace import WINDOW_S, Pace


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def walk(pace: Pace, clock: Clock, steps: int, step_s: float) -> None:
    for _ in range(steps):
        clock.now += step_s
        pace.look(pace.step + 1)


def test_the_first_step_does_not_count(clock) -> None:
    pace = Pace(0, clock=clock)
    clock.now = 60.0  # it compiles
    pace.look(1)
    assert pace.step_s is None
    assert pace.left_s(99, 0, 0, 0) is None
    walk(pace, clock, 1, 0.5)
    assert pace.step_s == pytest.approx(0.5)
    assert pace.left_s(98, 0, 0, 0) == pytest.approx(49.0)


def test_a_device_that_records_steps_begins_later(clock) -> None:
    pace = Pace(0, num_first=3, clock=clock)
    walk(pace, clock, 3, 60.0)
    walk(pace, clock, 2, 0.5)
    assert pace.step_s == pytest.approx(0.5)


def test_the_rate_is_that_of_the_last_seconds(clock) -> None:
    pace = Pace(0, clock=clock)
    walk(pace, clock, 100, 1.0)
    walk(pace, clock, int(2 * WINDOW_S / 0.1), 0.1)
    assert pace.step_s == pytest.approx(0.1, rel=0.05)
    assert pace.mean_step_s == pytest.approx((99 + 2 * WINDOW_S) / (99 + 20 * WINDOW_S), rel=0.01)


def test_validations_and_checkpoints_do_not_count_as_training(clock) -> None:
    pace = Pace(0, clock=clock)
    walk(pace, clock, 3, 1.0)
    pace.pause("no training")
    pace.pause("validation")
    clock.now += 50.0
    pace.go_on("validation")
    clock.now += 50.0
    pace.go_on("no training")
    walk(pace, clock, 3, 1.0)
    assert pace.step_s == pytest.approx(1.0)


def test_what_is_to_come_is_added_as_it_was_measured(clock) -> None:
    pace = Pace(0, clock=clock)
    walk(pace, clock, 3, 1.0)
    pace.begin_save()
    clock.now += 4.0
    pace.end_save()
    assert pace.left_s(10, 2, 30, 1) == pytest.approx(10 + 2 * 30 / 3 + 4)  # not measured yet
    pace.validations.begin()
    clock.now += 7.0
    pace.validations.end()
    clock.now -= 7.0
    assert pace.left_s(10, 2, 30, 1) == pytest.approx(10 + 2 * 7 + 4)


def test_a_step_that_is_shown_for_a_moment_is_no_way_back(clock) -> None:
    pace = Pace(0, clock=clock)
    walk(pace, clock, 5, 1.0)
    pace.look(2)
    assert pace.step == 5
    pace.go_back_to(2)
    assert (pace.step, pace.step_s) == (2, None)
    walk(pace, clock, 3, 0.5)
    assert pace.step_s == pytest.approx(0.5)
