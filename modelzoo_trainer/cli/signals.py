"""Signals where no trainer has taken them over: before a fit, in a validation, after a run."""

from __future__ import annotations

import enum
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from modelzoo_trainer.exit_codes import STOP_SIGNALS, exit_code


class Phase(enum.Enum):
    """What a signal would cut off."""

    STARTING = "nothing is lost: end at once"
    RUNNING = "unwind"
    ENDING = "let it come to its end"


class StopRequests:
    """Takes SIGINT, SIGTERM and SIGUSR1 for the length of a `with` block.

    Until something has been trained, one of them ends the process on the spot: an exception that a
    handler raises may be swallowed, where it comes in the middle of the import of a library in
    native code. Later it unwinds what is in progress. At the end of a run the first one is only
    remembered. A process that ends because of one disregards SIGTERM and SIGUSR1 from then on, and
    quits by SIGINT silently.

    `owns_process`: whether the process is there for the run alone; any other one is
    never ended on the spot.
    """

    def __init__(self, *, owns_process: bool = True) -> None:
        self.received: str | None = None
        """The first signal that did not end the process, here or in a trainer."""
        self._owns_process = owns_process
        self._ask: Callable[[], Phase] | None = None
        self._phase = Phase.STARTING
        self._before: dict[int, Any] = {}
        self._end: Callable[[str], None] | None = None
        self._ending = threading.Lock()

    def watch(self, end: Callable[[str], None]) -> None:
        """Have a thread end the process, where one is ended on the spot.

        It does so also while the main thread waits in native code, where Python's handlers are not
        called: for other processes.
        """
        if not (self._owns_process and self._before):
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
        return phase is Phase.STARTING

    def _end_by(self, name: str) -> None:
        """End the process, once."""
        if self._end is not None and self._ending.acquire(blocking=False):
            self._end(name)

    def set_phase(self, phase: Phase | Callable[[], Phase]) -> None:
        """Set what follows from a signal."""
        if isinstance(phase, Phase):
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
        is_leaving = self._owns_process and self.received is not None
        for number, before in self._before.items():
            if is_leaving:  # the exit code stays what it is
                signal.signal(number, self._quit if number == signal.SIGINT else signal.SIG_IGN)
            else:
                signal.signal(number, before or signal.SIG_DFL)
        self._before.clear()

    def _quit(self, number: int, frame: FrameType | None) -> None:
        os._exit(exit_code(self.received or "SIGINT"))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        phase = self._phase if self._ask is None else self._ask()
        if phase is Phase.STARTING and self._owns_process:
            if self._end is None:
                os._exit(exit_code(name))
            threading.Thread(target=self._end_by, args=(name,), daemon=True).start()
            return
        is_first = self.received is None
        self.received = self.received or name
        if phase is Phase.ENDING and is_first:
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(exit_code(name))
