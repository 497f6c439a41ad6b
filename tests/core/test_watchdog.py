"""Detection of a hanging run by the watchdog, with a fake clock, and the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from modelzoo_trainer.core.parts.watchdog import RunPosition, Watchdog


class Run:
    """A run whose position the test sets, and a watchdog that polls every second."""

    def __init__(self, **limits) -> None:
        self.position = RunPosition("start")
        self.watchdog = Watchdog(lambda: self.position, **limits)
        self.now = 0.0

    def stay(self, seconds, interval=1.0):
        """Return after how many seconds without progress it was considered hanging, or None."""
        end = self.now + seconds
        begin = self.now
        while self.now < end:
            self.now += interval
            if self.watchdog.is_hung(self.now):
                return self.now - begin
        return None

    def train(self, num, interval=1.0):
        for _ in range(num):
            self.position = RunPosition("train", self.position.count + 1, is_steady=True)
            assert self.stay(interval) is None


def test_between_batches_a_minute_is_too_long():
    run = Run()
    run.train(20)
    assert run.stay(100) == 61


def test_with_long_steps_it_is_ten_of_them():
    run = Run()
    run.train(10, interval=20)
    assert 19 + run.stay(1000) == 201  # it has stood still for 19 already


def test_many_batches_between_two_looks_are_so_much_shorter():
    run = Run()
    for num in range(1, 20):
        run.position = RunPosition("train", 100 * num, is_steady=True)
        run.stay(20)
    assert run.stay(1000) == pytest.approx(60, abs=20)


def test_a_limit_that_was_given_is_that():
    run = Run(hang_timeout=5)
    run.train(10)
    assert run.stay(100) == pytest.approx(6, abs=1)


def test_where_something_may_take_long_it_is_given_half_an_hour():
    run = Run()
    assert run.stay(10_000) == 1802  # counting begins at the first poll


def test_that_limit_can_be_given_and_is_never_the_shorter_one():
    assert Run(startup_timeout=10).stay(100) == pytest.approx(12, abs=1)
    assert Run(startup_timeout=10, hang_timeout=20).stay(100) == pytest.approx(22, abs=1)


def test_another_stretch_begins_again():
    run = Run(hang_timeout=5)
    run.train(10)
    run.stay(4)
    run.position = RunPosition("save", run.position.count)
    assert run.stay(1000) is None
    run.position = RunPosition("train", run.position.count + 1, is_steady=True)
    assert run.stay(100) == pytest.approx(6, abs=1)


def test_time_in_which_the_process_did_not_run_does_not_count():
    run = Run(hang_timeout=10)
    run.train(10)
    run.now += 10_000  # as after SIGSTOP and SIGCONT
    assert not run.watchdog.is_hung(run.now)
    assert run.watchdog.idle_s <= 3


def test_who_listens_is_reported_at_each_look():
    looks = []
    watchdog = Watchdog(lambda: RunPosition(0), on_look=lambda: looks.append(1))
    for now in range(3):
        assert not watchdog.is_hung(float(now))
    assert len(looks) == 3


def test_a_thread_that_was_stopped_looks_no_more():
    looks = []
    watchdog = Watchdog(lambda: RunPosition(0), on_look=lambda: looks.append(1))
    watchdog.stop()
    watchdog._run()
    assert looks == []


PROGRAM = """
import sys, time
from pathlib import Path
from modelzoo_trainer.core.parts import watchdog
from modelzoo_trainer.core.parts.watchdog import RunPosition, Watchdog

watchdog._LAST_RESORT_S = {last_resort_s}
one = Watchdog(lambda: RunPosition(0, 0, True), {stacks}, hang_timeout=0.1, on_hang={on_hang})
one.start()
time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="fills a pipe")
@pytest.mark.parametrize("stacks", [True, False])
@pytest.mark.parametrize("on_hang", ["None", "lambda found: time.sleep(60)"])  # a dead disk
def test_a_run_that_hangs_ends_though_nobody_reads_what_it_says(
    tmp_path, stuck_pipe, stacks, on_hang
):
    path = tmp_path / "stacks"
    are_written = stacks and on_hang == "None"
    program = PROGRAM.format(
        stacks=f"Path({str(path)!r})" if stacks else None,
        on_hang=on_hang,
        last_resort_s=60 if are_written else 4,  # a disk may be late
    )
    ended = subprocess.run([sys.executable, "-c", program], stderr=stuck_pipe, timeout=200)
    assert ended.returncode == 1
    if are_written:
        assert 'File "<string>"' in path.read_text()
