"""The rate of steps and the estimated time left."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

WINDOW_S: Final = 30.0
_FORWARD: Final = 1 / 3  # estimated time of a validation batch, in steps, until one is measured


class MeanPeriod:
    """The mean duration of a repeated event."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._total_s = 0.0
        self._num = 0
        self._began: float | None = None

    @property
    def value(self) -> float | None:
        """Mean seconds; None before the first event."""
        return self._total_s / self._num if self._num else None

    @property
    def is_under_way(self) -> bool:
        """Whether an event is in progress."""
        return self._began is not None

    def so_far(self) -> float:
        """Return the seconds of the event in progress; 0 if there is none."""
        began = self._began
        return 0.0 if began is None else self._clock() - began

    def begin(self) -> None:
        """Start an event."""
        self._began = self._clock()

    def end(self) -> None:
        """End the event. No-op if none is in progress."""
        if self._began is not None:
            self._total_s += self._clock() - self._began
            self._num += 1
            self._began = None


class Pace:
    """The rate of steps over the last `WINDOW_S` seconds of training, and the time left.

    Excludes the first step, which compiles and loads, and pauses. Thread-safe.

    `step`: the first step. `num_first`: the number of steps to exclude.
    """

    def __init__(
        self, step: int, num_first: int = 1, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counted_from = step + num_first
        self.step = step
        self._looks: deque[tuple[float, int]] = deque()  # seconds of training, step
        self._paused_s = 0.0
        self._pauses: set[str] = set()  # why it is paused
        self._paused_at = 0.0
        self._begin: tuple[float, int] | None = None  # the first look that counts
        self.validations = MeanPeriod(clock)
        self.saves = MeanPeriod(clock)

    # ---- observations

    def look(self, step: int) -> None:
        """Record the current step; ignore an earlier one, of a deferred delivery."""
        if step > self.step and self.saves.is_under_way:  # a save that had no end
            self.end_save()
        with self._lock:
            if step <= self.step:
                return
            self.step = step
            if step < self._counted_from:
                return
            self._looks.append((self._trained_s(), step))
            self._begin = self._begin or self._looks[-1]
            while len(self._looks) > 2 and self._looks[-1][0] - self._looks[1][0] > WINDOW_S:
                self._looks.popleft()

    def go_back_to(self, step: int) -> None:
        """Restart at another step, without earlier observations."""
        with self._lock:
            self.step = step
            self._counted_from = step + 1
            self._looks.clear()
            self._begin = None

    def pause(self, why: str) -> None:
        """Stop the clock, until every reason is removed."""
        with self._lock:
            if not self._pauses:
                self._paused_at = self._clock()
            self._pauses.add(why)

    def go_on(self, why: str) -> None:
        """Remove a reason for pausing. No-op if it is not set."""
        with self._lock:
            if why in self._pauses:
                self._pauses.remove(why)
                if not self._pauses:
                    self._paused_s += self._clock() - self._paused_at

    def begin_save(self) -> None:
        """Start timing a checkpoint."""
        self.pause("checkpoint")
        self.saves.begin()

    def end_save(self) -> None:
        """Stop timing a checkpoint. No-op if there is none."""
        self.go_on("checkpoint")
        self.saves.end()

    def _trained_s(self) -> float:
        now = self._paused_at if self._pauses else self._clock()
        return now - self._paused_s

    # ---- estimates

    @property
    def step_s(self) -> float | None:
        """Seconds per step; None if not known yet."""
        with self._lock:
            return self._step_s()

    def _step_s(self) -> float | None:
        if len(self._looks) < 2:
            return None
        (begin_s, begin), (end_s, end) = self._looks[0], self._looks[-1]
        return max(end_s - begin_s, 1e-9) / (end - begin)

    @property
    def mean_step_s(self) -> float | None:
        """Seconds per step since the start; None if not known."""
        with self._lock:
            if len(self._looks) < 2 or self._begin is None:
                return None
            (begin_s, begin), (end_s, end) = self._begin, self._looks[-1]
            return max(end_s - begin_s, 1e-9) / (end - begin)

    def left_s(
        self, num_steps: float, num_validations: float, num_batches: int, num_saves: float
    ) -> float | None:
        """Return the estimated seconds left; None if not known yet.

        `num_steps`: after the last recorded step. `num_batches`: of a validation, used until one
        is measured; 0 = not known.
        """
        with self._lock:
            step_s = self._step_s()
            if step_s is None:
                return None
            since = min(self._trained_s() - self._looks[-1][0], step_s)
        validation_s = self.validations.value
        if validation_s is None:
            validation_s = num_batches * step_s * _FORWARD
        others = num_validations * validation_s - min(self.validations.so_far(), validation_s)
        others = max(0.0, others) + num_saves * (self.saves.value or 0.0)
        return max(0.0, num_steps * step_s - since) + others
