"""Signals while no trainer handles them: before a fit, during validation, after a run."""

from __future__ import annotations

import enum
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from modelzoo_trainer.base.exit_codes import STOP_SIGNALS, exit_code


class ProcessPhase(enum.Enum):
    """What the process is doing when a signal arrives."""

    STARTING = "exit at once: nothing is lost"
    RUNNING = "unwind"
    ENDING = "finish"


class StopRequests:
    """Handles SIGINT, SIGTERM and SIGUSR1 during a `with` block.

    Before training starts, a signal exits the process at once, because an exception raised in a
    handler may be swallowed during the import of a native library. Later it raises an exception in
    the main thread. At the end of a run signals are only recorded, except for a second one that is
    SIGINT: job schedulers repeat SIGTERM, and mean the first. A process that exits because of a
    signal then ignores SIGTERM and SIGUSR1, and exits silently on SIGINT.

    `owns_process`: whether the process belongs to the run; any other process is never exited at
    once.
    """

    def __init__(self, *, owns_process: bool = True) -> None:
        self.received: str | None = None
        """The first signal that did not exit the process, here or in a trainer."""
        self.owns_process = owns_process
        self._ask: Callable[[], ProcessPhase] | None = None
        self._phase = ProcessPhase.STARTING
        self._before: dict[int, Any] = {}
        self._end: Callable[[str], None] | None = None
        self._ending = threading.Lock()

    def watch(self, end: Callable[[str], None]) -> None:
        """Exit by calling `end` in a thread, where the process is exited at once.

        This works even while the main thread waits in native code, where Python's handlers are not
        called.
        """
        if not (self.owns_process and self._before):
            return
        self._end = end
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

        def listen() -> None:
            while number := os.read(reading, 1):
                is_ours = signal.getsignal(number[0]) == self._receive  # and not a trainer's
                if is_ours and self._is_starting():
                    self._end_by(signal.Signals(number[0]).name)

        threading.Thread(target=listen, name="signals", daemon=True).start()

    def _is_starting(self) -> bool:
        phase = self._phase if self._ask is None else self._ask()
        return phase is ProcessPhase.STARTING

    def _end_by(self, name: str) -> None:
        """Exit the process, once."""
        if self._end is not None and self._ending.acquire(blocking=False):
            self._end(name)

    def set_phase(self, phase: ProcessPhase | Callable[[], ProcessPhase]) -> None:
        """Set what the process is doing."""
        if isinstance(phase, ProcessPhase):
            self._phase, self._ask = phase, None
        else:
            self._ask = phase

    def __enter__(self) -> Self:
        with suppress(ValueError):  # not the main thread: signals belong to the caller
            for number in STOP_SIGNALS:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._end is not None:
            signal.set_wakeup_fd(-1)
        if self.owns_process and self.received is not None:
            self.keep_code(exit_code(self.received))
        for number, before in self._before.items():
            signal.signal(number, before or signal.SIG_DFL)
        self._before.clear()

    def keep_code(self, code: int) -> None:
        """Let no later signal change the exit code of this process, which is about to exit.

        SIGTERM and SIGUSR1 are ignored from now on; SIGINT exits the process silently.
        """

        def quit_(number: int, frame: FrameType | None) -> None:
            os._exit(code)

        for number in self._before:
            signal.signal(number, quit_ if number == signal.SIGINT else signal.SIG_IGN)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        phase = self._phase if self._ask is None else self._ask()
        if phase is ProcessPhase.STARTING and self.owns_process:
            if self._end is None:
                os._exit(exit_code(name))
            threading.Thread(target=self._end_by, args=(name,), daemon=True).start()
            return
        is_first = self.received is None
        self.received = self.received or name
        if phase is ProcessPhase.ENDING and (is_first or number != signal.SIGINT):
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(exit_code(name))
