"""A process that has imported everything, and forks another one for each run: in milliseconds."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NoReturn

_PATIENCE_S: Final = 120.0
_ORPHANS_MAY_LIVE_S: Final = 30.0  # torch's own watchdog of workers needs six


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended.

    Args:
        code: Its exit code, or minus the number of the signal that killed it.
        seconds: How long it lived.
        orphans: How many processes of its session outlived it by seconds.
    """

    code: int
    seconds: float
    orphans: int


class Child:
    """A process that runs one function; the leader of a session of its own."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.nursery = nursery
        self.pid = pid
        self.begin = time.monotonic()
        self.descriptor = os.pidfd_open(pid)
        self.ended: Ended | None = None

    def has_ended(self, timeout_s: float = 0) -> bool:
        """Wait at most so long, and return whether it has ended."""
        return bool(select.select([self.descriptor], [], [], timeout_s)[0])

    def send(self, number: int) -> None:
        """Send a signal; it may have ended: it stays known until it is waited for."""
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = _PATIENCE_S) -> Ended:
        """Wait for its end, and for that of whatever it has started.

        Raises:
            TimeoutError: If it lives on; it is killed.
        """
        if self.ended is None:
            is_late = not self.has_ended(timeout_s)
            if is_late:
                self.send(signal.SIGKILL)
                self.has_ended(_PATIENCE_S)
            seconds = time.monotonic() - self.begin
            os.close(self.descriptor)
            code = self.nursery.ask("wait", self.pid)
            self.ended = Ended(code=code, seconds=seconds, orphans=orphans_of(self.pid))
            if is_late:
                raise TimeoutError(f"process {self.pid} lived longer than {timeout_s} s")
        return self.ended

    def kill_after(self, seconds: float, number: int = signal.SIGKILL) -> Ended:
        """Send a signal after so long, unless it ends before, and wait."""
        if not self.has_ended(seconds):
            self.send(number)
        return self.wait()


class Nursery:
    """Starts processes that have everything imported already.

    Args:
        output: File for what they write to standard output and error.
    """

    def __init__(self, output: Path) -> None:
        import modelzoo_trainer

        root = Path(modelzoo_trainer.__file__).resolve().parents[1]
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(output)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            text=True,
        )
        self.output = output

    def ask(self, *words: Any) -> Any:
        """Send a request and return the answer."""
        assert self._process.stdin is not None  # both are piped
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, function: str, *arguments: Any) -> Child:
        """Run a function of `reliability` in a process of its own.

        Args:
            function: "module:function"; what it returns is the exit code.
            *arguments: What JSON can hold.
        """
        return Child(self, self.ask("start", function, arguments))

    def run(self, function: str, *arguments: Any, timeout_s: float = _PATIENCE_S) -> Ended:
        """Do likewise, and wait for its end."""
        return self.start(function, *arguments).wait(timeout_s)

    def said(self) -> str:
        """Return what its children wrote: they show no progress."""
        return self.output.read_text(encoding="utf-8") if self.output.exists() else ""

    def close(self) -> None:
        """End it, and its children."""
        assert self._process.stdin is not None  # it is piped
        self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def orphans_of(session: int) -> int:
    """Return how many processes of a session are left, after those that end have ended."""
    deadline = time.monotonic() + _ORPHANS_MAY_LIVE_S
    while (left := members_of(session)) and time.monotonic() < deadline:
        time.sleep(0.005)
    for pid in left:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)
    return len(left)


def members_of(session: int) -> list[int]:
    """Return the processes of a session that are alive."""
    entries = [entry for entry in os.scandir("/proc") if entry.name.isdecimal()]
    return [int(entry.name) for entry in entries if _session_of(entry.path) == session]


def _session_of(folder: str) -> int | None:
    try:
        text = Path(folder, "stat").read_text(encoding="latin-1")
    except OSError:  # it has just ended
        return None
    state, _, _, session = text.rpartition(")")[2].split()[:4]
    return None if state in "ZX" else int(session)


# ---- the other side


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer requests until there are no more."""
    from tests.reliability.forkserver_tasks import warm_up

    warm_up()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in the children"
    gc.freeze()  # what is shared with the children stays shared
    left = set()
    for line in requests:
        what, *words = json.loads(line)
        if what == "wait":
            answer = os.waitstatus_to_exitcode(os.waitpid(words[0], 0)[1])
            left.discard(words[0])
        else:
            answer = os.fork()
            if answer == 0:
                _leave(requests, answers)
                _call(*words)
            left.add(answer)
        answers.write(f"{answer}\n")
        answers.flush()
    for pid in left:  # of tests that failed
        os.kill(pid, signal.SIGKILL)


def _leave(requests: IO[str], answers: IO[str]) -> None:
    """Become a process like any other."""
    os.setsid()
    os.close(requests.fileno())
    os.close(answers.fileno())


def _call(function: str, arguments: list[Any]) -> NoReturn:
    """Call a function, and end the process with what it returns."""
    module, name = function.split(":")
    called: Callable[..., int] = getattr(
        importlib.import_module(f"tests.reliability.{module}"), name
    )
    code = 1
    try:
        code = called(*arguments)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:  # noqa: BLE001  # as the interpreter does it
        traceback.print_exc()
    # The end of an interpreter, without taking all modules apart, which takes longer than a run.
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules are known as those of `tests.reliability`
    pipes = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    told = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for standard, place in enumerate((os.open(os.devnull, os.O_RDONLY), told, told)):
        os.dup2(place, standard)
    serve(*pipes)
