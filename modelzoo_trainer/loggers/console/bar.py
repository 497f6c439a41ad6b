"""A bar at the bottom of a terminal or below a notebook's cell; messages appear above it."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Final

from typing_extensions import override

BAR_INTERVAL_S: Final = 0.1
_LOGGERS: Final = ("modelzoo_trainer", None)  # their messages appear above the bar
_COLUMNS, _LINES = 99, 24  # default terminal size
_OPEN: Final[set[int]] = set()
_REPLACED: Final[list[tuple[logging.Logger, logging.Handler, logging.Handler]]] = []
_FORMAT: Final = "{desc}: {percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt}{postfix}"
_WITHOUT_END: Final = "{desc}: {n_fmt}{postfix}"


class Bar:
    """A bar at the bottom of the console; messages of `logging` appear above it.

    Several may be open at once, and close in any order; each has a separate line.

    `step`: the start. `total`: the end; None = not known. `name`: its label. `unit`: the unit of
    steps. `has_rate`: whether tqdm shows the rate and the time.
    """

    def __init__(
        self,
        step: int,
        total: int | None,
        name: str = "train",
        unit: str = "step",
        *,
        has_rate: bool = True,
    ) -> None:
        own = {} if has_rate else {"bar_format": _WITHOUT_END if total is None else _FORMAT}
        self._bar: Any = _bar_class()(
            total=total,
            initial=step,
            unit=unit,
            desc=name,
            leave=False,
            dynamic_ncols=True,
            mininterval=0.0,
            **own,
        )
        if not is_notebook():
            self._bar.dynamic_ncols = _size_of
            self._bar.ncols, self._bar.nrows = _size_of(self._bar.fp)
        if not _OPEN:
            _redirect_messages()
        _OPEN.add(id(self))

    def show(self, step: int, figures: str) -> None:
        """Draw the bar.

        `step`: the position. `figures`: the text after it.
        """
        self._bar.n = step
        self._bar.set_postfix_str(figures, refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        """Remove the bar. Idempotent."""
        if id(self) in _OPEN:
            _OPEN.remove(id(self))
        try:
            self._bar.close()
        finally:
            if not _OPEN:
                _restore_messages()


def _bar_class() -> Any:
    """Return tqdm's class for this console, without the thread that redraws its bars."""
    if is_notebook() and find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm as widget

        return type("Bar", (widget,), {"monitor_interval": 0})
    from tqdm import tqdm

    return type("Bar", (tqdm,), {"monitor_interval": 0})


def _size_of(stream: Any) -> tuple[int, int]:
    """Return the columns and lines of a terminal, or defaults."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except (AttributeError, OSError, ValueError):
        columns, lines = 0, 0
    return columns - 1 if columns else _COLUMNS, lines or _LINES


class _AboveBars(logging.Handler):
    """Makes another handler write above the bars."""

    def __init__(self, inner: logging.StreamHandler[Any]) -> None:
        super().__init__(inner.level)
        self._inner = inner

    @override
    def handle(self, record: logging.LogRecord) -> bool:
        from tqdm import tqdm

        is_handled: bool | None = None
        with suppress(Exception), tqdm.external_write_mode(file=self._inner.stream):
            is_handled = bool(self._inner.handle(record))
        if is_handled is None:  # removing a bar failed
            return bool(self._inner.handle(record))
        return is_handled

    @override
    def flush(self) -> None:
        self._inner.flush()


def _redirect_messages() -> None:
    """Write console messages above the bars, until the last one is closed."""
    for logger in map(logging.getLogger, _LOGGERS):
        for number, handler in enumerate(logger.handlers):
            if _is_console(handler):
                above = _AboveBars(handler)  # type: ignore[arg-type]  # it has a stream
                logger.handlers[number] = above
                _REPLACED.append((logger, handler, above))


def _restore_messages() -> None:
    """Restore the handlers, except those removed in the meantime."""
    while _REPLACED:
        logger, handler, above = _REPLACED.pop()
        with suppress(ValueError):
            logger.handlers[logger.handlers.index(above)] = handler


def _is_console(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and handler.stream in (
        sys.stderr,
        sys.stdout,
    )


# ---- type of console


def is_terminal() -> bool:
    """Return whether standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shells = sys.modules.get("IPython.core.interactiveshell")
    is_made = shells is not None and shells.InteractiveShell.initialized()
    return is_made and hasattr(shells.InteractiveShell.instance(), "kernel")  # type: ignore[union-attr]  # it is there


# ---- texts


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
