"""How fast a run is, and how long it will still take: from looks at its step, now and then."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

WINDOW_S: Final = 30.0
_FORWARD: Final = 1 / 3  # of a step's time, for a validation batch, until one was measured


class Mean:
    """The mean length of something that happens now and then."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._total_s = 0.0
        self._num = 0
        self._began: float | None = None

    @property
    def value(self) -> float | None:
        """Seconds; None if it has not happened."""
        return self._total_s / self._num if self._num else None

    @property
    def is_under_way(self) -> bool:
        """Whether one has begun and not ended."""
        return self._began is not None

    def so_far(self) -> float:
        """Return the seconds of the one under way; 0 if there is none."""
        began = self._began
        return 0.0 if began is None else self._clock() - began

    def begin(self) -> None:
        """Begin one."""
        self._began = self._clock()

    def end(self) -> None:
        """End it. No-op if none has begun."""
        if self._began is not None:
            self._total_s += self._clock() - self._began
            self._num += 1
            self._began = None


class Pace:
    """The rate of steps over the last `WINDOW_S` seconds of training, and what is left.

    Seconds count from the end of the first step, which compiles and loads, and not while paused.
    Two threads may use it: the run's own, and one that looks.

    `step`: at which the run begins. `num_first`: how many steps do not count.
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
        self.validations = Mean(clock)
        self.saves = Mean(clock)

    # ---- what is seen

    def look(self, step: int) -> None:
        """Take in a step: one that is less than before was only shown for a moment."""
        if step > self.step and self.saves.is_under_way:  # it failed, or is still being written
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
        """Begin at another step: what was seen does not count."""
        with self._lock:
            self.step = step
            self._counted_from = step + 1
            self._looks.clear()
            self._begin = None

    def pause(self, why: str) -> None:
        """Have time not count, until every reason is gone."""
        with self._lock:
            if not self._pauses:
                self._paused_at = self._clock()
            self._pauses.add(why)

    def go_on(self, why: str) -> None:
        """Take a reason back. No-op if it is none."""
        with self._lock:
            if why in self._pauses:
                self._pauses.remove(why)
                if not self._pauses:
                    self._paused_s += self._clock() - self._paused_at

    def begin_save(self) -> None:
        """Have the time of a checkpoint count as such."""
        self.pause("checkpoint")
        self.saves.begin()

    def end_save(self) -> None:
        """Have training count again. No-op if no checkpoint is being written."""
        self.go_on("checkpoint")
        self.saves.end()

    def _trained_s(self) -> float:
        now = self._paused_at if self._pauses else self._clock()
        return now - self._paused_s

    # ---- what comes of it

    @property
    def step_s(self) -> float | None:
        """Seconds a step; None if they are not known yet."""
        with self._lock:
            return self._step_s()

    def _step_s(self) -> float | None:
        if len(self._looks) < 2:
            return None
        (begin_s, begin), (end_s, end) = self._looks[0], self._looks[-1]
        return max(end_s - begin_s, 1e-9) / (end - begin)

    @property
    def mean_step_s(self) -> float | None:
        """Seconds a step since the run began; None if they are not known."""
        with self._lock:
            if len(self._looks) < 2 or self._begin is None:
                return None
            (begin_s, begin), (end_s, end) = self._begin, self._looks[-1]
            return max(end_s - begin_s, 1e-9) / (end - begin)

    def left_s(
        self, num_steps: float, num_validations: float, num_batches: int, num_saves: float
    ) -> float | None:
        """Return the seconds that are left; None if not known yet.

        `num_steps`: from the last step that was seen. `num_batches`: of a validation, as long as
        none was measured; 0 = not known.
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
