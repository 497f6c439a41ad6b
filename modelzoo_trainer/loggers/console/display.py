"""The progress display of a run: a bar, or periodic lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from modelzoo_trainer.loggers.console.bar import (
    BAR_INTERVAL_S,
    Bar,
    duration,
    is_notebook,
    is_terminal,
)
from modelzoo_trainer.loggers.console.harmless import harmless
from modelzoo_trainer.loggers.console.ticker import Ticker, drawing

log = logging.getLogger("modelzoo_trainer.progress")

LINE_INTERVAL_S: Final = 10.0
_FIRST_LINE_S: Final = 1.0  # after the start, if there are no metrics yet
_LINES_TICK_S: Final = 0.25
_NOTEBOOK_TICK_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The progress of a run at one moment."""

    name: str = "train"  # or the validation's name
    unit: str = "step"
    step: int
    total: int | None
    epoch: str = ""  # such as "epoch 2/5"
    losses: tuple[str, ...] = ()  # such as "loss 0.31234", "lr 0.001"
    unit_s: float | None = None  # seconds per step or batch; None = not known yet
    elapsed_s: float = 0.0
    left_s: float | None = None
    doing: str = ""  # current activity other than training, such as "validate_0 12/50"

    def figures(self) -> list[str]:
        """Return the texts after the position."""
        found = [*self.losses]
        if self.unit_s is not None:
            found.append(rate(self.unit_s, self.unit))
        return [*found, self.doing] if self.doing else found

    def left(self) -> str:
        """Return the time left; "" if the end is not known."""
        if self.total is None:
            return ""
        return "estimating" if self.left_s is None else f"{duration(self.left_s)} left"

    def line(self) -> str:
        """Format the progress as a line."""
        position = str(self.step) if self.total is None else f"{self.step}/{self.total}"
        times = [f"{duration(self.elapsed_s)} elapsed", *filter(None, [self.left()])]
        parts = [f"{self.name} {self.unit} {position}", *filter(None, [self.epoch])]
        return " | ".join([*parts, *self.figures(), ", ".join(times)])


def rate(unit_s: float, unit: str) -> str:
    """Format seconds per step as steps per second, or as seconds if more than one."""
    if unit_s > 1:
        return f"{unit_s:.3g} s/{unit}"
    plural = f"{unit}es" if unit == "batch" else f"{unit}s"
    per_s = 1 / unit_s
    return f"{per_s:.0f} {plural}/s" if per_s >= 100 else f"{per_s:.3g} {plural}/s"


def kind_of_console(progress: str | None) -> str:
    """Return the user's choice, or "bar" or "lines" by the type of console."""
    if progress is not None:
        return progress
    return "bar" if is_terminal() or is_notebook() else "lines"


class Display:
    """Display what `look` returns, from `start` to `stop`, in a thread.

    `kind`: "bar" or "lines". `interval_s`: minimum seconds between two lines of logged steps, or
    two updates of the bar; None = 10, 0.1.
    """

    def __init__(self, kind: str, look: Callable[[], View], interval_s: float | None) -> None:
        self.is_bar = kind == "bar"
        self._look = look
        default = BAR_INTERVAL_S if self.is_bar else LINE_INTERVAL_S
        self._interval_s = default if interval_s is None else interval_s
        self._bar: Bar | None = None
        self._drawn = self._next = self._begin = time.perf_counter()
        self._shown: tuple[int, str] | None = None
        self._ticker = Ticker(self._tick, self._tick_s())

    def _tick_s(self) -> float:
        if not self.is_bar:
            return _LINES_TICK_S
        return _NOTEBOOK_TICK_S if is_notebook() else BAR_INTERVAL_S

    def start(self) -> None:
        """Start the display."""
        with harmless(logging.DEBUG), drawing():
            view = self._look()
            self._shown = view.step, view.doing
            if self.is_bar:
                self._bar = Bar(view.step, view.total, view.name, view.unit, has_rate=False)
                self._draw(view)
        if self.is_bar and self._bar is None:  # drawing failed: use lines
            self.is_bar, self._interval_s = False, LINE_INTERVAL_S
        with harmless():
            self._ticker.start()

    def stop(self) -> None:
        """Remove the bar and stop the thread. Idempotent."""
        self._ticker.stop()
        if self._bar is not None:
            with drawing():
                with harmless(logging.DEBUG):
                    self._draw(self._look())
                with harmless(logging.DEBUG):
                    self._bar.close()
            self._bar = None

    # ---- called by the thread

    def _tick(self) -> None:
        view = self._look()
        now = time.perf_counter()
        if self._bar is not None:
            if now >= self._drawn + self._interval_s:
                self._drawn = now
                self._draw(view)
            return
        due = max(self._next, self._drawn + LINE_INTERVAL_S)
        if self._drawn == self._begin:  # the first line
            due = self._begin + _FIRST_LINE_S
        if now >= due and (view.step, view.doing) != self._shown:
            self._say(view)

    def _draw(self, view: View) -> None:
        assert self._bar is not None  # the display has started
        # A narrow terminal truncates the end.
        figures = [view.epoch, view.left(), view.doing, *view.figures()]
        self._bar.show(view.step, ", ".join(dict.fromkeys(filter(None, figures))))

    # ---- called by the run

    def say_if_due(self) -> None:
        """Log a line for new metrics, if lines are shown and one is due."""
        if not self.is_bar and time.perf_counter() >= self._next:
            self.say()

    def say(self) -> None:
        """Log a line, if lines are shown and the position is new."""
        if not self.is_bar:
            with harmless(logging.DEBUG), drawing():
                view = self._look()
                if (view.step, view.doing) != self._shown:
                    self._say(view)

    def _say(self, view: View) -> None:
        self._drawn = time.perf_counter()
        self._next = self._drawn + self._interval_s
        self._shown = view.step, view.doing
        log.info("%s", view.line())
