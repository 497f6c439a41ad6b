"""The classes of ends, told from exit codes and from what a child says of itself."""

from __future__ import annotations

import json

import pytest

from modelzoo_trainer.errors import CheckpointError, CheckpointMismatch, ConfigError, HookError
from modelzoo_trainer.tools.supervisor.outcome import FAILURES, Outcome, classify
from modelzoo_trainer.tools.supervisor.protocol import ChildFailure, ChildReport

NOTHING = ChildReport()


def status_of(error, step=None):
    return ChildReport(failure=ChildFailure.of(error, step))


@pytest.mark.parametrize(
    ("code", "outcome", "cause", "exit_code"),
    [
        (0, "done", "finished", 0),
        (1, "crashed", "ended with exit code 1", 1),
        (2, "invalid configuration", "the command or the file is invalid", 2),
        (3, "crashed", "ended with exit code 3", 1),
        (130, "stopped on request", "stopped by SIGINT", 130),
        (143, "stopped on request", "stopped by SIGTERM", 143),
        (-2, "stopped on request", "stopped by SIGINT", 130),
        (-10, "stopped on request", "stopped by SIGUSR1", 143),
        (-15, "stopped on request", "stopped by SIGTERM", 143),
        (-9, "killed", "killed by SIGKILL (possibly out of memory)", 1),
        (-11, "killed", "killed by SIGSEGV", 1),
        (-6, "killed", "killed by SIGABRT", 1),
        (-64, "killed", "killed by SIGRTMAX", 1),
        (-200, "killed", "killed by signal 200", 1),
    ],
)
def test_a_code_alone_says_this(code, outcome, cause, exit_code):
    ending = classify(code, NOTHING)
    assert (ending.outcome, ending.cause, ending.exit_code) == (outcome, cause, exit_code)


@pytest.mark.parametrize("code", [143, -15, -9, 1])
def test_after_a_signal_that_was_passed_on_any_end_is_a_stop(code):
    ending = classify(code, status_of(RuntimeError("late")), passed_on=("SIGUSR1", "SIGTERM"))
    assert (ending.outcome, ending.cause) == (Outcome.STOPPED, "stopped by SIGUSR1")
    assert ending.exit_code == 143


def test_a_child_that_finishes_all_the_same_is_done():
    assert classify(0, NOTHING, passed_on=("SIGTERM",)).outcome is Outcome.DONE
    assert classify(0, NOTHING, hung="no progress").outcome is Outcome.DONE


@pytest.mark.parametrize("code", [1, -9, -12])
def test_a_hang_is_one_however_it_was_ended(code):
    ending = classify(code, NOTHING, hung="no progress for 60 s")
    assert (ending.outcome, ending.cause) == (Outcome.HUNG, "hung: no progress for 60 s")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RuntimeError("x"), Outcome.CRASHED),
        (MemoryError(), Outcome.CRASHED),
        (CheckpointError("x"), Outcome.CRASHED),
        (OSError(5, "Input/output error"), Outcome.CRASHED),
        (ImportError("x"), Outcome.NOT_RETRYABLE),
        (ModuleNotFoundError("x"), Outcome.NOT_RETRYABLE),
        (SyntaxError("x"), Outcome.NOT_RETRYABLE),
        (HookError("x"), Outcome.NOT_RETRYABLE),
        (CheckpointMismatch("x"), Outcome.NOT_RETRYABLE),
        (ConfigError("x"), Outcome.INVALID_CONFIG),
    ],
)
def test_an_exception_says_whether_another_attempt_may_fare_better(error, outcome):
    ending = classify(1, status_of(error))
    assert ending.outcome is outcome
    assert (outcome in FAILURES) is (outcome is Outcome.CRASHED)


def test_the_first_line_of_a_message_is_the_cause():
    assert classify(1, status_of(ValueError("a\nb"))).cause == "ValueError: a"
    assert classify(1, status_of(ValueError())).cause == "ValueError"
    kind = "modelzoo_trainer.errors.CheckpointError"
    assert classify(1, status_of(CheckpointError("a"))).cause == f"{kind}: a"


def test_equal_exceptions_are_known_again_whatever_addresses_they_name():
    def fingerprint(error, step):
        return classify(1, status_of(error, step)).fingerprint

    one = fingerprint(RuntimeError("object at 0x7f00"), 3)
    assert one == fingerprint(RuntimeError("object at 0x7fAA"), 3)
    assert one != fingerprint(RuntimeError("object at 0x7f00"), 4)
    assert one != fingerprint(ValueError("object at 0x7f00"), 3)
    assert classify(1, NOTHING).fingerprint is None


def test_a_status_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "attempt_1.json"
    written = ChildReport(pid=7, checkpoint="c", failure=ChildFailure.of(KeyError("k"), 3))
    written.write(path)
    assert ChildReport.read(path) == written
    assert [one.name for one in tmp_path.iterdir()] == ["attempt_1.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"failure": {}}', '{"failure": 1}', "\xff"])
def test_of_a_status_that_nobody_wrote_nothing_is_known(tmp_path, text):
    path = tmp_path / "attempt_1.json"
    path.write_bytes(text.encode("latin-1"))
    assert ChildReport.read(path) == NOTHING
    assert ChildReport.read(tmp_path / "none") == NOTHING


def test_a_long_message_is_shortened(tmp_path):
    status_of(ValueError("x" * 10_000)).write(tmp_path / "status")
    assert len(json.loads((tmp_path / "status").read_text())["failure"]["message"]) == 2000


def test_an_exit_code_of_0_before_the_end_is_no_success() -> None:
    ending = classify(0, NOTHING, is_cut=True)
    assert ending.outcome is Outcome.CRASHED
    assert ending.cause == "ended with exit code 0 before the run was finished"
    assert ending.exit_code == 1
