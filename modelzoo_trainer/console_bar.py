"""A bar at the bottom of a terminal, with the messages of `logging` above it."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from typing import Any, Final

BAR_INTERVAL_S: Final = 0.1
_REDIRECT: Final = ExitStack()
_OPEN: Final[set[int]] = set()


class Bar:
    """A bar at the bottom of the terminal; messages of `logging` appear above it.

    Several may be open at once, and close in any order; each has a line of its own.

    Args:
        step: Where it begins.
        total: Where it ends; None = not known.
        name: What stands before it.
        unit: What it counts.
    """

    def __init__(
        self, step: int, total: int | None, name: str = "train", unit: str = "step"
    ) -> None:
        from tqdm import tqdm

        self._bar: Any = tqdm(total=total, initial=step, unit=unit, desc=name, leave=False)
        if not _OPEN:
            _redirect_messages()
        _OPEN.add(id(self))

    def show(self, step: int, figures: str) -> None:
        """Draw it.

        Args:
            step: How far it is.
            figures: What stands behind it.
        """
        self._bar.n = step
        self._bar.set_postfix_str(figures, refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        """Take it away; a second call does nothing."""
        self._bar.close()
        if id(self) in _OPEN:
            _OPEN.remove(id(self))
            if not _OPEN:
                _REDIRECT.close()


def _redirect_messages() -> None:
    """Have messages to the console written above the bars, until the last of these is closed."""
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    loggers = [logging.getLogger(name) for name in ("modelzoo_trainer", None)]
    consoles = [logger for logger in loggers if any(map(_is_console, logger.handlers))]
    _REDIRECT.enter_context(logging_redirect_tqdm(loggers=consoles, tqdm_class=tqdm))


def is_terminal() -> bool:
    """Return whether standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def duration(seconds: float) -> str:
    """Return seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def number(value: Any) -> str:
    """Return a metric's value as text, numbers with five decimals or digits."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.5f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.5g}"


def _is_console(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and handler.stream in (
        sys.stderr,
        sys.stdout,
    )
