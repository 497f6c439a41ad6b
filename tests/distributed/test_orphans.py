"""Processes whose launcher was killed end; those that something else has started do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.distributed.launching import ROOT, Launched, command, told, wait_until
from tests.handled_signals import handles

GONE_S = 10.0
UNDER_TORCHRUN = {"TORCHELASTIC_RUN_ID": "test", "RANK": "1", "LOCAL_RANK": "0"}

_PROCESS = """
import os, pathlib, signal, sys, time
from backends.coordination import orphans
orphans._LOOK_S, orphans._STOP_S = 0.02, float(sys.argv[2])
if sys.argv[3] == "deaf":
    signal.signal(signal.SIGTERM, lambda *_: None)
orphans.watch_launcher()
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(60)
"""
_LAUNCHER = """
import os, subprocess, sys
subprocess.run(sys.argv[2:], env={**os.environ, **eval(sys.argv[1])})
"""


class Family:
    """A process, and the launcher that has started it."""

    def __init__(self, place: Path, env: dict[str, str], how: str, stop_s: float, *between: str):
        mark = place / "pid"
        own = [*between, sys.executable, "-c", _PROCESS, str(mark), str(stop_s), how]
        self.launcher = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, repr(env), *own], cwd=ROOT, stderr=subprocess.PIPE
        )
        wait_until(lambda: mark.exists() and mark.read_text())
        self.pid = int(mark.read_text())

    def kill_launcher(self) -> None:
        self.launcher.kill()
        self.launcher.wait()

    def is_alive(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"


@pytest.fixture
def families() -> Iterator[list[Family]]:
    made: list[Family] = []
    yield made
    for family in made:
        with suppress(ProcessLookupError):
            os.kill(family.pid, signal.SIGKILL)
        family.launcher.kill()
        family.launcher.communicate()


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@needs_proc
@pytest.mark.parametrize(
    ("how", "between"),
    [
        ("stops", ()),
        ("deaf", ()),
        ("stops", ("sh", "-c", '"$@"; true', "sh")),  # a script that torchrun has started
    ],
)
@pytest.mark.slow_cases(every=4)
def test_a_process_ends_soon_after_its_torchrun_was_killed(
    tmp_path, families, how, between
) -> None:
    stop_s = 0.1 if how == "deaf" else 60.0
    family = Family(tmp_path, UNDER_TORCHRUN, how, stop_s, *between)
    families.append(family)
    family.kill_launcher()
    wait_until(lambda: not family.is_alive(), 10.0)


@needs_proc
def test_a_process_that_was_not_started_by_torchrun_outlives_its_parent(tmp_path, families) -> None:
    without = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}  # Slurm, a script
    family = Family(tmp_path, without, "stops", 0.0)
    families.append(family)
    family.kill_launcher()
    with pytest.raises(AssertionError, match="in vain"):
        wait_until(lambda: not family.is_alive(), 0.3)


# CI: while it trains, and while it hangs.
@pytest.mark.soak_cases("loads")
@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([], id="trains"),
        pytest.param(["init.callbacks[Disturb].how=hang"], id="hangs"),
        pytest.param(["fit.train_dataloader.num_workers=1"], id="loads"),
    ],
)
def test_no_process_is_alive_ten_seconds_after_torchrun_was_killed(tmp_path, changes) -> None:
    folder, limit = tmp_path / "run", tmp_path / "limit"
    pauses = [f"init.callbacks[Tell].{word}" for word in (f"limit={limit}", "pause=0.05")]
    limit.write_text("12")
    words = command(folder, *pauses, "init.callbacks[Disturb].rank=0", *changes)
    with Launched(tmp_path / "l", words, options=["--max-restarts=2"]) as launched:
        wait_until(lambda: len(told(folder)) >= 9, what=launched.said)
        launched.process.kill()
        launched.process.wait()
        assert launched.left(GONE_S) == []
    assert "torchrun is gone" in launched.said
    limit.unlink()
    words = command(folder)
    with Launched(tmp_path / "again", words) as launched:
        assert launched.code() == 0, launched.said
    begins = [int(line[1]) for line in told(folder) if line[0] == "begin"]
    assert len(begins) == 2
    assert begins[1] >= 6  # the checkpoint before, or that of the stop


def _num_listening(launched: Launched) -> int:
    """Return how many processes have come to handle signals, which is when they begin to watch."""
    return sum(handles(pid, signal.SIGTERM) for pid in launched.workers().values())


@needs_proc
@pytest.mark.slow
def test_a_run_whose_torchrun_is_killed_while_it_starts_ends(tmp_path, monkeypatch) -> None:
    (tmp_path / "zoo_endless_start.py").write_text("import time\ntime.sleep(300)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = command(tmp_path / "run", "--import", "zoo_endless_start")
    with Launched(tmp_path / "l", words) as launched:
        wait_until(lambda: _num_listening(launched) == 2, what=launched.said)
        launched.process.kill()
        launched.process.wait()
        assert launched.left(GONE_S) == []
    assert told(tmp_path / "run") == []
