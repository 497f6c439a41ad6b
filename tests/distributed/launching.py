"""Whole runs in several processes: under torchrun, or with workers that are started by hand."""

from __future__ import annotations

import ctypes
import json
import multiprocessing as mp
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed import TCPStore

from tests.distributed.ranks import environment, start_workers_as_a_program_does
from tests.handled_signals import handles

ROOT = Path(__file__).resolve().parents[2]
PARAMS = Path(__file__).with_name("small.yaml")
PATIENCE_S = 180.0
_CONTEXT = mp.get_context("forkserver")
_MARK = "MODELZOO_TEST_RUN"


def command(folder: Path, *words: str) -> list[str]:
    """Return what comes after `run.py`, for the small run.

    Args:
        folder: Where it writes.
        words: Further options; those with a `.` and a `=` go with `--set`.
    """
    given = [
        f"init.model_dir={folder}",
        "init.progress=none",
        f"init.callbacks[Tell].path={folder}.told",
        *words,
    ]
    changes = [part for word in given for part in (["--set", word] if is_change(word) else [word])]
    imported = ["--import", "tests.distributed.disturbing"]
    return ["--params", str(PARAMS), *imported, *changes]


def is_change(word: str) -> bool:
    """Return whether a word is a change of the file."""
    return not word.startswith("-") and "=" in word


class Workers:
    """Processes that run `run.py` together; forked from one that has imported everything.

    Args:
        folder: Where they leave what they say.
        words: What comes after `run.py`, of all or of each.
        num: How many there are.
        environ: What each has in its environment besides torchrun's; None takes a name away.
        place: The folder that each is started in.
        prepare: Called in each of them before `run.py`.
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[str] | Sequence[Sequence[str]],
        num: int = 2,
        environ: Callable[[int], dict[str, str | None]] = lambda rank: {},
        place: Callable[[int], Path] = lambda rank: ROOT,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._outputs = [folder / f"said-{rank}" for rank in range(num)]
        self._processes: list[BaseProcess] = []
        for rank, output in enumerate(self._outputs):
            output.unlink(missing_ok=True)
            env = {**environment(rank, num, self._agent.port), **environ(rank)}
            given = words if words and isinstance(words[0], str) else words[rank]
            process = _CONTEXT.Process(
                target=_work, args=(str(output), env, str(place(rank)), list(given), prepare)
            )
            process.start()
            self._processes.append(process)
        self.pids = [process.pid or 0 for process in self._processes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def send(self, rank: int, number: int) -> None:
        """Send a signal to one of them, if it lives."""
        with suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)

    def wait_for(self, text: str, rank: int = 0, timeout_s: float = PATIENCE_S) -> None:
        """Wait until one of them has said something."""
        wait_until(lambda: text in self.said_by(rank), timeout_s, text)

    def wait_for_handlers(self, rank: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until one of them handles SIGTERM by itself."""

        def is_so() -> bool:
            try:
                return handles(self.pids[rank], signal.SIGTERM)
            except OSError as error:
                raise AssertionError(f"process {rank} has ended:\n{self.said}") from error

        wait_until(is_so, timeout_s, "a handler of SIGTERM")

    def codes(self, timeout_s: float = PATIENCE_S) -> list[int | None]:
        """Wait, and return their exit codes; None = it lives."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        return [process.exitcode for process in self._processes]

    def wait_for_one(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until one of them has ended."""
        mp.connection.wait([process.sentinel for process in self._processes], timeout_s)

    def wait_until(self, is_true: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Wait until something is true, while all of them live."""

        def is_so() -> bool:
            assert all(process.is_alive() for process in self._processes), self.said
            return is_true()

        wait_until(is_so, timeout_s, pause_s=0.1)

    @property
    def said(self) -> str:
        """What all of them have written to standard output and error."""
        return "".join(self.said_by(rank) for rank in range(len(self._outputs)))

    def said_by(self, rank: int) -> str:
        """Return what one of them has written."""
        path = self._outputs[rank]
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def left(self, timeout_s: float = 0.0) -> list[int]:
        """Return the processes of their sessions that are alive, and are still after a time."""
        return _left(lambda pid: _session_of(pid) in self.pids, timeout_s)


def _work(
    output: str,
    env: dict[str, str | None],
    place: str,
    words: list[str],
    prepare: Callable[[], None] | None,
) -> None:
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # for good
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _be_quiet()
    start_workers_as_a_program_does()
    os.chdir(place)
    if prepare is not None:
        prepare()
    sys.argv = ["run.py", *words]
    runpy.run_path(str(ROOT / "run.py"), run_name="__main__")


def _be_quiet() -> None:
    """Do what the command line has torch do when it is imported; here it has been already."""
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
    ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = 2


class Launched:
    """A `torchrun` in a session of its own, and what it has started.

    Args:
        folder: Where it leaves what it says.
        words: What comes after `run.py`.
        num: How many processes it starts.
        options: Its own, such as "--max-restarts=5".
    """

    def __init__(
        self, folder: Path, words: Sequence[str], num: int = 2, options: Sequence[str] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._mark = f"{folder}/{time.monotonic_ns()}"
        self._output = folder / "launched"
        self._lines = folder / "standard_output"
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}"]
        env = os.environ | {_MARK: self._mark, "OMP_NUM_THREADS": "1"}
        with self._output.open("wb") as output, self._lines.open("wb") as lines:
            self.process = subprocess.Popen(
                [sys.executable, *start, *options, "run.py", *words],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=output,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for pid in self.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def code(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end, and return its exit code."""
        return self.process.wait(timeout_s)

    @property
    def said(self) -> str:
        """What it and its processes have written to standard error."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    @property
    def printed(self) -> str:
        """What they have written to standard output."""
        return self._lines.read_text(encoding="utf-8", errors="replace")

    def worker_codes(self) -> dict[int, int]:
        """Return the exit codes of the processes that torchrun tells of, by rank."""
        found = re.findall(r"rank\s*: (\d+) .*\n\s*exitcode\s*: (-?\d+)", self.said)
        return {int(rank): int(code) for rank, code in found}

    def workers(self) -> dict[int, int]:
        """Return the numbers of the processes that run `run.py` now, by rank."""
        found = {}
        for pid in self.left():
            env = _environ_of(pid)
            if "RANK" in env and _parent_of(pid) == self.process.pid:
                found[int(env["RANK"])] = pid
        return found

    def left(self, timeout_s: float = 0.0) -> list[int]:
        """Return likewise those that it has started, and itself."""
        return _left(lambda pid: _environ_of(pid).get(_MARK) == self._mark, timeout_s)


def wait_until(
    is_true: Callable[[], Any],
    timeout_s: float = PATIENCE_S,
    what: str = "",
    pause_s: float = 0.01,
) -> None:
    """Wait until something is true.

    Raises:
        AssertionError: If it does not become so in time.
    """
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain: {what}"
        time.sleep(pause_s)


def set_limit(path: Path, step: int) -> None:
    """Write the last step that `Tell` lets the processes take; at once, as they read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(str(step))
    new.replace(path)


def told(folder: Path, rank: int = 0) -> list[list[str]]:
    """Return what `Tell` has written of one process."""
    path = Path(f"{folder}.told.{rank}")
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def weights(folder: Path, rank: int = 0) -> dict[int, set[str]]:
    """Return the digests of the weights after each step: of all attempts at it."""
    found: dict[int, set[str]] = {}
    for word, step, digest in told(folder, rank):
        if word == "step":
            found.setdefault(int(step), set()).add(digest)
    return found


def logged(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


KEPT = (".finished.json", ".lock")  # hidden files that belong to a folder of checkpoints


def unfinished(folder: Path) -> list[str]:
    """Return what a save has begun and not finished."""
    return sorted(path.name for path in folder.glob(".*") if path.name not in KEPT)


# ---- the processes of this host


def _left(is_meant: Callable[[int], bool], timeout_s: float) -> list[int]:
    # A child that asks the system something, and is left behind for that moment, is no orphan.
    deadline = time.monotonic() + timeout_s
    while True:
        found = [pid for pid in _processes() if is_meant(pid)]
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.01)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and _is_alive(int(name))]


def _is_alive(pid: int) -> bool:
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def _parent_of(pid: int) -> int | None:
    return int((_stat(pid)[1:2] or ["0"])[0])


def _session_of(pid: int) -> int:
    return int((_stat(pid)[3:4] or ["0"])[0])


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()
    except OSError:  # it has just ended
        return []


def _environ_of(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(part.split("=", 1) for part in text.split("\0") if "=" in part)
