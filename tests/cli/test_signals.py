"""What a signal does where no trainer has taken it over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelzoo_trainer.base.exit_codes import STOP_SIGNALS, exit_code
from modelzoo_trainer.cli.signals import ProcessPhase, StopRequests

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """\
import os, signal, sys
sys.path.insert(0, {root!r})
from modelzoo_trainer.cli.signals import ProcessPhase, StopRequests

class Swallow:
    def __del__(self):  # as a library in native code that drops what is raised in it
        os.kill(os.getpid(), signal.{name})

with StopRequests() as requests:
    swallow = Swallow()
    del swallow
    print("outlived it")
"""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore what a run that a signal has ended leaves ignored, for the tests that follow."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("name", "code"),
    [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 143), ("stop file", 143), ("max_time", 143)],
)
def test_the_codes(name, code):
    assert exit_code(name) == code


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 143)])
@pytest.mark.slow_cases(every=4)
def test_at_the_start_nothing_can_swallow_it(name, code):
    program = PROGRAM.format(root=str(ROOT), name=name)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def send(name):
    os.kill(os.getpid(), getattr(signal, name))


def test_a_process_that_is_somebody_elses_is_not_ended_on_the_spot():
    with StopRequests(owns_process=False), pytest.raises(SystemExit) as caught:
        send("SIGTERM")
    assert caught.value.code == 143


def test_in_a_run_it_unwinds():
    with StopRequests() as requests:
        requests.set_phase(lambda: ProcessPhase.RUNNING)
        with pytest.raises(SystemExit) as caught:
            send("SIGUSR1")
        with pytest.raises(KeyboardInterrupt):
            send("SIGINT")
    assert caught.value.code == 143
    assert requests.received == "SIGUSR1"


def test_at_the_end_the_first_is_remembered_and_only_a_second_ctrl_c_unwinds():
    with StopRequests() as requests:
        requests.set_phase(lambda: ProcessPhase.RUNNING)
        requests.set_phase(ProcessPhase.ENDING)
        send("SIGTERM")
        send("SIGUSR1")  # job schedulers repeat themselves
        send("SIGTERM")
        assert requests.received == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            send("SIGINT")


def test_the_handlers_of_before_are_back_afterwards():
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with StopRequests():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    after = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    assert after == before


def test_in_another_thread_signals_are_left_alone():
    seen = []

    def enter():
        with StopRequests():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_a_late_ctrl_c_ends_a_process_that_ends_without_a_word() -> None:
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from modelzoo_trainer.cli.signals import StopRequests
with StopRequests() as requests:
    requests.received = "SIGTERM"
os.kill(os.getpid(), signal.SIGINT)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (143, "")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
@pytest.mark.slow_cases(every=4)
def test_none_changes_a_code_that_is_to_be_kept(name) -> None:
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from modelzoo_trainer.cli.signals import StopRequests
with StopRequests() as requests:
    requests.keep_code(7)
    os.kill(os.getpid(), signal.{name})
os.kill(os.getpid(), signal.{name})
sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (7, "")


def test_a_late_signal_does_not_change_the_code_of_a_process_that_ends() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequests() as requests:
        requests.received = "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) not in (before, signal.SIG_IGN)
