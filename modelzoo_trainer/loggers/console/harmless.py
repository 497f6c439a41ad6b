"""Keep errors of the console output from ending a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

log = logging.getLogger("modelzoo_trainer.console")
T = TypeVar("T")


@contextmanager
def harmless(level: int = logging.WARNING) -> Iterator[None]:
    """Log an error instead of raising it. Also a decorator.

    `level`: DEBUG for expected errors: of users' objects, or a closed console.
    """
    try:
        yield
    except Exception as error:  # any error: the run must continue
        kind = type(error).__name__
        text = "failed to show the progress: %s: %s. Training continues."
        log.log(level, text, kind, error, exc_info=error if level == logging.DEBUG else None)


def known(value: Callable[[], T], otherwise: T) -> T:
    """Return the result of a function, or a default if it raises."""
    with harmless(logging.DEBUG):
        return value()
    return otherwise
