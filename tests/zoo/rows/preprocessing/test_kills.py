"""Processes that are killed leave no orphans, and the next run writes the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modelzoo_trainer.base.exit_codes import DONE, FAILED
from modelzoo_trainer.zoo.rows.hdf5_format import INCOMPLETE
from tests.zoo.rows.preprocessing.runs import HOOK, tree_digest, write_lines
from tests.zoo.rows.toys import byte_tokenizer

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")

PROGRAM = """
import signal
import sys
from modelzoo_trainer.zoo.rows.preprocessing import readers
from modelzoo_trainer.zoo.rows.preprocessing.pipeline import preprocess
from modelzoo_trainer.config.preprocessing import read_settings
from pathlib import Path
if __name__ == "__main__":
    readers.UNIT_BYTES = 40_000
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    preprocess(read_settings(Path(sys.argv[1]))[0], save_s=0.02)
"""

ENDLESS = """
import time
from pathlib import Path
def read(entry, text_key):
    (Path(__file__).parent / "reading").touch()
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    for name in "ab":
        texts = [f"{name}{number} " + "word " * (number % 700) for number in range(700)]
        write_lines(tmp_path / "in" / f"{name}.jsonl", texts)
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    byte_tokenizer(tmp_path / "bytes")
    return tmp_path


def start(
    folder: Path, out: str, processes: int, more: str = "", hook: str = HOOK
) -> subprocess.Popen[bytes]:
    path = folder / f"{out}.yaml"
    path.write_text(
        f"setup: {{mode: pretraining, data: {{type: local, source: {folder / 'in'}}}, "
        f"output_dir: {folder / out}, processes: {processes}, "
        "data_splits: {a: {split_fraction: 0.5}, b: {split_fraction: 0.5}}}\n"
        f"processing: {{huggingface_tokenizer: {folder / 'bytes'}, max_seq_length: 128, "
        f"write_chunk_size: 64, read_hook: '{hook}', read_hook_kwargs: {{text_key: text}}, "
        f"{more}}}\n",
        encoding="utf-8",
    )
    command = [sys.executable, str(folder / "program.py"), str(path)]
    return subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)


def members(group: int) -> list[int]:
    """Return the processes of a session that are not zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_until_gone(group: int) -> None:
    end = time.monotonic() + 20
    while members(group):
        assert time.monotonic() < end, f"orphans: {members(group)}"
        time.sleep(0.02)


def is_worker(number: int) -> bool:
    try:
        return b"spawn_main" in Path(f"/proc/{number}/cmdline").read_bytes()
    except OSError:
        return False


def kill(process: subprocess.Popen[bytes], whom: str) -> None:
    group = process.pid
    workers = [one for one in members(group) if is_worker(one)]
    if whom == "group":
        os.killpg(group, signal.SIGKILL)
    elif whom == "main":
        process.kill()
    elif workers:
        os.kill(random.choice(workers), signal.SIGKILL)


def wait_for_progress(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until the state on disk is another one, or the process has ended."""
    state = folder / "out" / "INCOMPLETE.npz"
    first = time_of(state)
    while time_of(state) == first and process.poll() is None:
        time.sleep(0.01)


def time_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def run_with_kills(folder: Path, whom: str, seed: int, more: str = "", *, most: int = 3) -> int:
    """Kill and restart, then let the run end; return how often something was killed."""
    instants = random.Random(seed)
    for kills in range(most):
        process = start(folder, "out", 2, more)
        if kills or whom == "worker":
            wait_for_progress(folder, process)
        time.sleep(instants.uniform(0, 0.1 if kills or whom == "worker" else 1.0))
        kill(process, whom)
        code = process.wait(60)
        wait_until_gone(process.pid)
        written = [path.name for path in (folder / "out").rglob("*") if path.is_file()]
        if written and not any(name.startswith("INCOMPLETE") for name in written):
            return kills  # also of a run that was killed after its last act
        assert code in (FAILED, -signal.SIGKILL)
    assert start(folder, "out", 2, more).wait(60) == DONE
    return most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whom", "more"), [("group", "shuffle: true"), ("main", ""), ("worker", "")]
)
def test_a_killed_run_is_continued_with_equal_bytes(folder, whom, more) -> None:
    assert start(folder, "whole", 1, more).wait(60) == DONE
    kills = run_with_kills(folder, whom, seed=len(whom) + len(more), more=more)
    assert kills > 0
    assert tree_digest(folder / "out") == tree_digest(folder / "whole")
    assert not [*folder.rglob(INCOMPLETE)]


@pytest.mark.slow
def test_an_interrupt_ends_all_processes(folder) -> None:
    (folder / "endless.py").write_text(ENDLESS, encoding="utf-8")
    process = start(folder, "out", 3, hook="endless:read")
    while not (folder / "reading").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) != DONE
    wait_until_gone(process.pid)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_many_instants_the_bytes_are_equal(folder, seed) -> None:
    assert start(folder, "whole", 3).wait(60) == DONE
    run_with_kills(folder, ("group", "main", "worker")[seed % 3], seed, most=8)
    assert tree_digest(folder / "out") == tree_digest(folder / "whole")
