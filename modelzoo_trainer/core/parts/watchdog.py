"""The hang watchdog: detects that a run hangs, dumps the stacks, and ends it."""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.base import stderr
from modelzoo_trainer.base.sibling import require_sibling

require_sibling("backends")
from backends.coordination.liveness import StallTimer as StallTimer  # noqa: E402  # does not import torch

HANG_TIMEOUT_S: Final = 60.0
"""Default seconds without progress between batches; more if ten steps take longer."""
STARTUP_TIMEOUT_S: Final = 1800.0
"""Default seconds without progress in slow operations: start-up, first step, checkpoints."""

_STEPS: Final = 10
_INTERVAL_S: Final = 1.0
_NUM_KEPT: Final = 101
_FAILED: Final = 1
_LAST_RESORT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class RunPosition:
    """Position of a run.

    Args:
        mark: Identifies the phase of the run; a change is progress.
        count: Batches in the phase; an increase is progress.
        is_steady: Whether the next batch should take no longer than the previous ones.
    """

    mark: Any
    count: int = 0
    is_steady: bool = False


class Watchdog:
    """A thread that ends the process when the run has made no progress for too long.

    It polls the position of the run, so there is no cost for the run.

    Args:
        look: Returns the position; called in the thread.
        stacks: File that the stacks of all threads are appended to; None = standard error.
        hang_timeout: Seconds without progress between batches, > 0; None = 60, or ten times the
            median step if that is more.
        startup_timeout: Likewise at start-up, for the first batches of a phase, for checkpoints and
            between phases; None = 1800. At least `hang_timeout`.
        on_hang: Called first, with the reason.
        on_look: Called at each poll.
    """

    def __init__(
        self,
        look: Callable[[], RunPosition],
        stacks: Path | None = None,
        *,
        hang_timeout: float | None = None,
        startup_timeout: float | None = None,
        on_hang: Callable[[str], None] | None = None,
        on_look: Callable[[], None] | None = None,
    ) -> None:
        self._look = look
        self._stacks = stacks
        self._on_hang = on_hang
        self._on_look = on_look
        self._timer = StallTimer(_INTERVAL_S)
        self.set_limits(hang_timeout, startup_timeout)
        self._durations: deque[float] = deque(maxlen=_NUM_KEPT)
        self._position: RunPosition | None = None
        self._is_over = threading.Event()

    def set_limits(self, hang_timeout: float | None, startup_timeout: float | None) -> None:
        """Replace the limits given to the constructor."""
        self._hang_timeout_s = hang_timeout
        patience_s = STARTUP_TIMEOUT_S if startup_timeout is None else startup_timeout
        self._startup_timeout_s = max(patience_s, hang_timeout or 0.0)
        shortest_s = min(self._startup_timeout_s, hang_timeout or HANG_TIMEOUT_S)
        self._timer.interval_s = min(_INTERVAL_S, shortest_s / 4)

    def start(self) -> None:
        """Start polling."""
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop polling."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(self._timer.interval_s):
            if self.is_hung(time.monotonic()):
                self._end()

    def is_hung(self, now: float) -> bool:
        """Poll the position, and return whether it has not changed for too long.

        Args:
            now: Monotonic time in seconds.
        """
        if self._on_look is not None:
            self._on_look()
        position = self._look()
        known, self._position = self._position, position
        spent_s = self._timer.look((position.mark, position.count), now)
        if known is not None and known.mark == position.mark and known.count != position.count:
            self._durations.append(spent_s / max(1, position.count - known.count))
        return self.idle_s > self.limit_s

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return self._timer.idle_s

    @property
    def limit_s(self) -> float:
        """Maximum seconds without progress at the current position."""
        position = self._position
        if position is None or not position.is_steady:
            return self._startup_timeout_s
        if self._hang_timeout_s is not None:
            return self._hang_timeout_s
        median_s = statistics.median(self._durations) if self._durations else 0.0
        return max(HANG_TIMEOUT_S, _STEPS * median_s)

    def _end(self) -> None:
        """End the process, without waiting for locks that the hanging thread may hold.

        If the run hangs because a disk or the reader of standard error is gone, it ends without
        stacks.
        """
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(_LAST_RESORT_S, exit=True, file=nowhere)
        found = f"no progress for {self.idle_s:.0f} s"
        if self._on_hang is not None:
            self._on_hang(found)
        place = "below" if self._stacks is None else f"in {self._stacks}"
        stderr.write(f"The run hangs: {found}. Stacks: {place}.\n")
        try:
            self._dump()
        finally:
            os._exit(_FAILED)

    def _dump(self) -> None:
        try:
            if self._stacks is None:
                raise FileNotFoundError
            descriptor = os.open(self._stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            faulthandler.dump_traceback(descriptor)
            os.fsync(descriptor)
        except OSError:
            faulthandler.dump_traceback(sys.__stderr__ or stderr.DESCRIPTOR)
