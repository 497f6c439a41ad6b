"""Killed and resumed for long, with retention: disk, descriptors, threads, memory stay flat."""

from __future__ import annotations

import os
import random
import re
import time
from contextlib import suppress
from pathlib import Path

import pytest

from modelzoo_trainer import checkpointing
from tests.reliability.runs import Run, Runs

KEEP = 3


def sizes_of(run: Run) -> tuple[int, int]:
    """Return how many checkpoints there are, and how many bytes all is but log and metrics."""
    num_bytes = 0
    for path in run.folder.rglob("*"):
        with suppress(FileNotFoundError):  # renamed or deleted by the run
            if path.is_file() and path.name not in ("run.log", "metrics.jsonl"):
                num_bytes += path.stat().st_size
    return len(checkpointing.list_checkpoints(run.folder)), num_bytes


def resources_of(pid: int) -> tuple[int, int, int]:
    """Return how many descriptors, threads, and MiB of resident memory a process has."""
    folder = Path(f"/proc/{pid}")
    num_pages = int((folder / "statm").read_text().split()[1])
    memory = num_pages * os.sysconf("SC_PAGE_SIZE") >> 20
    return len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")), memory


def shared_memory() -> dict[str, int]:
    """Return the names in shared memory, and how many bytes each has."""
    found = {}
    for path in Path("/dev/shm").iterdir():
        with suppress(FileNotFoundError):
            found[path.name] = path.stat().st_size
    return found


def bytes_left_of(names: set[str]) -> int:
    """Return how many bytes stay under some names in shared memory that no process has mapped.

    Those of others come and go. A semaphore of 32 bytes is left by a kill between the two calls
    that name and unname it.
    """
    deadline = time.monotonic() + 60
    while names and time.monotonic() < deadline:
        time.sleep(0.1)
        names = (names & shared_memory().keys()) - mapped()
    return sum(num_bytes for name, num_bytes in shared_memory().items() if name in names)


def mapped() -> set[str]:
    """Return the names in shared memory that living processes have mapped."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has just ended
            found |= set(re.findall(r"/dev/shm/(\S+)", path.read_text(encoding="latin-1")))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kills", [8, pytest.param(400, marks=pytest.mark.soak)])
def test_the_disk_does_not_fill_however_often_a_run_is_killed(runs: Runs, count, kills) -> None:
    generator = random.Random(21)
    run = runs.new(steps=100_000, keep=KEEP, asynchronous=True, every=2)
    before = shared_memory()
    most = most_left = 0
    for number in range(kills):
        child = run.start()
        if number % 2:  # others may be killed before they have come to a checkpoint
            run.wait_for(child, "saved", already=run.num_told("saved"))
            run.end(child.kill_after(generator.uniform(0, 0.15)))
        else:
            run.end(child.kill_after(generator.uniform(0.03, 0.25)))
        num, _ = sizes_of(run) if run.folder.exists() else (0, 0)
        most, most_left = max(most, num), max(most_left, len(run.leftovers()))
    steps = max(step for attempt in run.attempts for step in attempt.saved)
    count(kills=kills, steps=steps, most_checkpoints=most, most_left_behind=most_left)
    assert run.num_lost() == 0
    assert most <= KEEP + 2  # the one before may be on its way out, one on its way in
    assert most_left <= 2
    assert bytes_left_of(shared_memory().keys() - before.keys()) < 1024


@pytest.mark.soak
def test_a_long_run_holds_what_it_held_at_first(runs: Runs, count) -> None:
    run = runs.new(steps=100_000, keep=KEEP, asynchronous=True, workers=2)
    child = run.start()
    run.wait_for(child, "saved", already=KEEP)
    child.has_ended(5)
    bytes_at_first = sizes_of(run)[1]
    seen = []
    for _ in range(50):
        child.has_ended(1.1)
        seen.append(resources_of(child.pid))
    num, num_bytes = sizes_of(run)
    assert not child.has_ended()
    run.end(child.kill_after(0))
    early, late = (
        [max(column) for column in zip(*part, strict=True)] for part in (seen[:20], seen[-20:])
    )
    count(
        seconds=60,
        steps=max(run.attempts[0].saved),
        most_descriptors=late[0],
        most_threads=late[1],
        most_mebibytes=late[2],
    )
    assert late[0] <= early[0] + 8
    assert late[1] <= early[1] + 2
    assert late[2] <= early[2] + 8
    assert num <= KEEP + 2
    assert num_bytes < 4 * bytes_at_first
