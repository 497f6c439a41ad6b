"""Real children, small ones, under a real supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.supervisor import outcome, process, supervising
from modelzoo_trainer.tools.supervisor.protocol import write_json
from modelzoo_trainer.tools.supervisor.settings import SupervisorSettings
from modelzoo_trainer.tools.supervisor.supervising import supervise

CHILD = Path(__file__).with_name("small_child.py")
ROOT = Path(__file__).resolve().parents[3]


class Supervised:
    """What came of it."""

    def __init__(self, code: int, told: list[str]) -> None:
        self.code = code
        self.told = told
        [self.folder] = Path("run/restarts").iterdir()
        self.ledger = json.loads((self.folder / "ledger.json").read_text())
        self.specs = list(map(json.loads, Path("specs").read_text().splitlines()))

    def ends(self):
        return [(one["outcome"], one["cause"]) for one in self.ledger["attempts"]]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that supervises a child with a list of acts for each attempt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outcome, "FIRST_PAUSE_S", 0.01)

    def start(*plan, num_restarts=3, num_trainers=1, tell=None, **limits):
        told = []
        one = SupervisorSettings(model_dir=Path("run"), max_num_restarts=num_restarts, **limits)
        command = [sys.executable, str(CHILD), json.dumps(plan)]
        code = supervise(command, [one] * num_trainers, tell or told.append)
        return Supervised(code, told)

    return start


def wait_for(path: Path, text: str) -> str:
    """Return a file's text when it has `text` in it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and text in path.read_text():
            return path.read_text()
        time.sleep(0.01)
    raise TimeoutError(f"{path} has no {text!r}")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it has just ended; or there is no such folder here
        return not Path("/proc/self/stat").exists()


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(pid)


def test_a_run_that_is_done_is_not_started_again(run, capfd):
    done = run(["output:hello", "start:0", "train:4"])
    assert (done.code, done.ends()) == (0, [("done", "finished")])
    assert capfd.readouterr().out == "hello\n"
    assert done.told[0].startswith("done after 1 attempt and ")
    assert sorted(path.name for path in done.folder.iterdir()) == ["ledger.json"]


def test_a_run_that_crashed_once_is_restarted_and_reported(run):
    done = run(["start:0", "train:3", "save:2", "fail:broken"], ["start:2", "train:5"])
    assert done.code == 0
    assert done.ends() == [("crashed", "RuntimeError: broken"), ("done", "finished")]
    assert [one["attempt"] for one in done.specs] == [1, 2]
    assert [one["is_restart"] for one in done.specs] == [False, True]
    assert [one["checkpoint"] for one in done.specs] == [None, "checkpoint_2"]
    facts = ("Attempt 1", "step 3", "RuntimeError: broken", "newest checkpoint", "3 more restarts")
    assert [fact for fact in facts if fact not in done.told[0]] == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc here")
def test_attempts_keep_no_file_descriptor_open(run):
    nums = []
    failing = [
        [f"start:{step}", f"train:{step + 1}", f"save:{step + 1}", "fail:x"] for step in range(4)
    ]
    run(*failing, ["exit:0"], tell=lambda _: nums.append(len(os.listdir("/proc/self/fd"))))
    assert len(nums) == 5
    assert len(set(nums)) == 1


def test_a_child_that_was_killed_is_started_again(run):
    done = run(["signal:SIGKILL"], ["exit:0"])
    assert done.code == 0
    assert done.ends()[0] == ("killed", "killed by SIGKILL (possibly out of memory)")
    assert done.specs[1]["is_restart"] is False
    assert "failed before the first step" in done.told[0]
    assert "from the start" in done.told[0]


def test_a_crash_in_native_code_leaves_its_stacks(run):
    done = run(["signal:SIGSEGV"], ["exit:0"])
    assert done.ends()[0] == ("killed", "killed by SIGSEGV")
    assert "in signal" in (done.folder / "stacks_1.txt").read_text()
    assert not (done.folder / "stacks_2.txt").exists()


def test_a_crash_loop_ends_when_the_budget_is_used_up(run):
    done = run(["signal:SIGKILL"], num_restarts=2)
    assert done.code == 1
    assert [outcome for outcome, _ in done.ends()] == ["killed"] * 3
    assert "Not restarting: 2 restarts" in done.told[2]


@pytest.mark.slow
def test_progress_gives_the_whole_budget_back(run):
    plan = [[f"start:{2 * n}", f"train:{2 * n + 2}", f"fail:{n}"] for n in range(4)]
    done = run(*plan, ["exit:0"], num_restarts=1)
    assert done.code == 0
    assert len(done.ends()) == 5


def test_the_same_error_at_the_same_step_is_not_tried_a_third_time(run):
    done = run(["start:0", "train:3", "fail:at 0x7f01"], ["start:0", "train:3", "fail:at 0x7f02"])
    assert done.code == 1
    assert len(done.ends()) == 2
    assert "Not restarting: the same error" in done.told[1]


@pytest.mark.parametrize(
    ("acts", "code", "end"),
    [
        (["miss:zoo"], 1, ("not retryable", "ModuleNotFoundError: No module named 'zoo'")),
        (["start:0", "exit:2"], 2, ("invalid configuration", "the command or the file is invalid")),
        (["signal:SIGTERM"], 143, ("stopped on request", "stopped by SIGTERM")),
        (["exit:143"], 143, ("stopped on request", "stopped by SIGTERM")),
        (["interrupted:SIGINT", "exit:130"], 130, ("stopped on request", "stopped by SIGINT")),
        (
            ["interrupted:stop file", "exit:143"],
            143,
            ("stopped on request", "stopped by stop file"),
        ),
    ],
)
@pytest.mark.slow_cases(every=4)
def test_what_nobody_can_mend_or_somebody_asked_for_is_not_started_again(run, acts, code, end):
    done = run(acts)
    assert (done.code, done.ends()) == (code, [end])


def test_a_wrong_configuration_leaves_nothing_behind(run, tmp_path):
    one = SupervisorSettings(model_dir=Path("run"), max_num_restarts=3)
    command = [sys.executable, str(CHILD), json.dumps([["exit:2"]])]
    assert supervise(command, [one], print) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["specs"]


def test_trainers_that_are_done_are_not_run_again(run):
    first = ["start:0", "train:3", "save:3", "done:1", "signal:SIGKILL"]
    done = run(first, ["exit:0"], num_trainers=2)
    assert [one["trainer"] for one in done.specs] == [0, 1]
    assert [one["is_restart"] for one in done.specs] == [False, False]
    assert done.ledger["seconds"]["lost"] == 0


@pytest.mark.slow
def test_a_stopped_process_is_killed_and_counts_as_hung(run):
    acts = ["start:0", "train:2", "save:2", "signal:SIGSTOP"]
    done = run(acts, ["exit:0"], hang_timeout=0.2)
    assert done.code == 0
    assert done.ends()[0] == ("hung", "hung: the process did not respond for 2 s")


def test_what_a_killed_child_has_left_behind_is_killed_as_well(run):
    run(["leave_behind:300", "signal:SIGKILL"], ["exit:0"])
    left = int(Path("told").read_text().split()[-1])
    assert wait_until_gone(left)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    one = SupervisorSettings(model_dir=tmp_path / "file", max_num_restarts=1)
    with pytest.raises(ConfigError, match=r"file' cannot be used: .*file' is a file, not"):
        supervise([sys.executable], [one], print)


def test_a_ledger_that_cannot_be_written_is_told_once_and_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = []
    plan = json.dumps([["block_ledger:", "start:0", "train:1", "signal:SIGKILL"], ["exit:0"]])
    one = SupervisorSettings(model_dir=Path("run"), max_num_restarts=1)
    assert supervise([sys.executable, str(CHILD), plan], [one], told.append) == 0
    assert sum("ledger.json" in text for text in told[:-1]) == 1


def test_how_a_child_ended_is_known_though_who_started_us_ignores_ends_of_children(run):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        done = run(["start:0", "train:1", "exit:2"])
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert done.code == 2


@pytest.mark.slow
def test_a_child_that_cannot_be_killed_is_named(run, monkeypatch):
    kills = []  # as if it waited for a dead disk
    monkeypatch.setattr(subprocess.Popen, "kill", lambda popen: kills.append(popen))
    monkeypatch.setattr(process, "_KILL_S", 0.1)
    with pytest.raises(TimeoutError, match=r"Process \d+ was killed but has not ended"):
        run(["start:0", "train:2", "signal:SIGSTOP"], hang_timeout=0.2)
    [left] = kills
    monkeypatch.undo()
    left.kill()
    left.wait()


# ---- signals, and the end of the supervisor itself


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGUSR1", 143), ("SIGINT", 130)])
@pytest.mark.slow_cases(every=4)
def test_a_signal_is_passed_on_once_and_the_run_ends(run, name, code):
    def send():
        wait_for(Path("told"), "ready")
        os.kill(os.getpid(), getattr(signal, name))

    sender = threading.Thread(target=send)
    sender.start()
    done = run([f"heed:{name}", "tell:ready", "sleep:300"])
    sender.join()
    assert (done.code, done.ends()) == (code, [("stopped on request", f"stopped by {name}")])
    assert f"got {name}" in Path("told").read_text()


def test_the_same_signal_a_second_time_kills(run):
    def send():
        wait_for(Path("told"), "ready")
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(Path("told"), "got SIGTERM")
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    done = run(["note:SIGTERM", "tell:ready", "sleep:300", "tell:outlived"])
    sender.join()
    assert (done.code, done.ends()) == (143, [("stopped on request", "stopped by SIGTERM")])
    assert "outlived" not in Path("told").read_text()


def test_a_signal_between_two_attempts_ends_the_run(run, monkeypatch):
    monkeypatch.setattr(outcome, "FIRST_PAUSE_S", 60.0)

    def send():
        wait_for(Path("told"), "failed")
        os.kill(os.getpid(), signal.SIGTERM)

    def tell(text):
        with Path("told").open("a") as file:
            file.write(f"{text}\n")

    sender = threading.Thread(target=send)
    sender.start()
    done = run(["signal:SIGKILL"], tell=tell)
    sender.join()
    assert done.code == 143
    assert [outcome for outcome, _ in done.ends()] == ["killed"]


def test_a_signal_while_a_failure_is_written_down_ends_the_run_as_one_in_the_pause_does(
    run, monkeypatch
):
    def write(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        write_json(*arguments)

    monkeypatch.setattr(supervising, "write_json", write)
    done = run(["signal:SIGKILL"])
    assert done.code == 143
    assert [outcome for outcome, _ in done.ends()] == ["killed"]
    assert "failed" in done.told[0]
    assert "estarting" not in done.told[0]


def test_the_handlers_of_before_are_back_afterwards(run):
    before = signal.getsignal(signal.SIGTERM)
    run(["exit:0"])
    assert signal.getsignal(signal.SIGTERM) == before


PROGRAM = """\
import json, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from modelzoo_trainer.tools.supervisor.settings import SupervisorSettings
from modelzoo_trainer.tools.supervisor.supervising import supervise
plan = json.dumps([["tell:ready", "sleep:300"]])
settings = SupervisorSettings(model_dir=Path("run"), max_num_restarts=1)
assert "torch" not in sys.modules and "numpy" not in sys.modules
supervise([sys.executable, {child!r}, plan], [settings], print)
"""


def test_a_child_dies_with_its_supervisor_which_knows_nothing_of_torch(tmp_path):
    program = PROGRAM.format(root=str(ROOT), child=str(CHILD))
    supervisor = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    child = int(wait_for(tmp_path / "told", "ready").split()[-1])
    assert is_alive(child)
    supervisor.kill()
    supervisor.wait()
    assert wait_until_gone(child)


# ---- the ledger


@pytest.mark.slow
def test_the_seconds_of_the_ledger_add_up(run):
    first = ["start:0", "train:1", "train:2", "save:2", "train:3", "signal:SIGKILL"]
    before = time.monotonic()
    done = run(first, ["start:2", "train:3", "train:4", "sleep:0.05"])
    elapsed = time.monotonic() - before
    ledger = done.ledger
    assert sum(ledger["seconds"].values()) == pytest.approx(ledger["wall_s"])
    assert ledger["wall_s"] <= elapsed
    for one in ledger["attempts"]:
        assert sum(one["seconds"].values()) == pytest.approx(one["wall_s"] + one["seconds"]["down"])
    by_attempt = [one["seconds"] for one in ledger["attempts"]]
    assert ledger["seconds"]["lost"] == by_attempt[0]["lost"] > 0
    assert by_attempt[0]["steps"] > 0
    assert ledger["goodput"] == pytest.approx(ledger["seconds"]["steps"] / ledger["wall_s"])
    assert ledger["num_restarts"] == 1
