"""The child's process: start, signals, heartbeat check, kill."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final

from modelzoo_trainer.base.exit_codes import DONE, INTERRUPTED, PREEMPTED, STOP_SIGNALS
from modelzoo_trainer.core.parts.watchdog import StallTimer
from modelzoo_trainer.tools.supervisor.child import STACKS_SIGNAL
from modelzoo_trainer.tools.supervisor.protocol import SharedStatus, TimeKind
from modelzoo_trainer.tools.supervisor.settings import SupervisorSettings

_POLL_S: Final = 0.05
_SLOW_END_S: Final = 10.0  # for a hung child to write its stacks and exit
_STACKS_S: Final = 1.0
_KILL_S: Final = 60.0


class Stops:
    """Signals that ask the supervisor to stop, in order of arrival."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.num_handled = 0

    @property
    def is_asked(self) -> bool:
        """Whether a signal has arrived."""
        return bool(self.received)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record these signals instead of dying. Only the main thread can."""
        before = {}
        try:
            for number in STOP_SIGNALS:
                before[number] = signal.signal(number, self._receive)
            ended = getattr(signal, "SIGCHLD", None)
            if ended is not None and signal.getsignal(ended) is signal.SIG_IGN:
                # An inherited handler would hide how a child ended.
                before[ended] = signal.signal(ended, signal.SIG_DFL)
        except ValueError:  # not the main thread: the caller handles signals
            pass
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number).name)

    def pause(self, seconds: float) -> None:
        """Sleep until the time is over or a signal has arrived."""
        end = time.monotonic() + seconds
        while not self.is_asked and time.monotonic() < end:
            time.sleep(min(_POLL_S, seconds))


class Process:
    """A child in its own process group, so that Ctrl-C reaches it once, through the supervisor.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(self, command: Sequence[str], shared: SharedStatus, stops: Stops) -> None:
        self._shared = shared
        self._stops = stops
        # A group in the background must not read from the terminal.
        self._popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(shared.descriptor,), process_group=0
        )
        self.hung: str | None = None
        """Why the child was killed, if it stopped responding."""
        self._timer = StallTimer(_POLL_S)

    def wait(self, settings: SupervisorSettings) -> int:
        """Wait for the child to end; return its exit code, below 0 = the signal that killed it."""
        while self._popen.poll() is None:
            time.sleep(_POLL_S)
            self._pass_on()
            self._watch(settings)
        code = self._popen.returncode
        if code not in (DONE, INTERRUPTED, PREEMPTED):
            self._sweep()
        return code

    def _pass_on(self) -> None:
        stops = self._stops
        while stops.num_handled < len(stops.received):
            name = stops.received[stops.num_handled]
            if name in stops.received[: stops.num_handled]:
                self._kill()
            else:
                self._popen.send_signal(getattr(signal, name))
            stops.num_handled += 1

    def _watch(self, settings: SupervisorSettings) -> None:
        shared = self._shared
        if shared.is_hung:
            limit_s = _SLOW_END_S
        elif shared.kind == TimeKind.STARTUP:
            limit_s = settings.startup_timeout_s
        else:
            limit_s = settings.beat_timeout_s
        if self._timer.is_stalled(shared.heartbeat, limit_s):
            self.hung = f"the process did not respond for {self._timer.idle_s:.0f} s"
            self._write_stacks()
            self._kill()

    def _write_stacks(self) -> None:
        # If the child has no handler for the signal yet, the signal kills it, which is acceptable.
        if STACKS_SIGNAL is not None:
            self._popen.send_signal(STACKS_SIGNAL)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(_STACKS_S)

    def _kill(self) -> None:
        if self._popen.poll() is not None:
            return
        self._popen.kill()
        try:
            self._popen.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"Process {self._popen.pid} was killed but has not ended: it is blocked on a "
                f"device or a disk. Check these; the run can be resumed once the process is gone."
            ) from None

    def _sweep(self) -> None:
        """Kill processes left behind by the child, such as starting workers."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
