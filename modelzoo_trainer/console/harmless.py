"""Errors in showing a run do not end it."""

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

    `level`: DEBUG where one is to be expected: users' objects, a console that is gone.
    """
    try:
        yield
    except Exception as error:  # whatever it is, the run must not suffer
        kind = type(error).__name__
        text = "failed to show the progress: %s: %s. Training continues."
        log.log(level, text, kind, error, exc_info=error if level == logging.DEBUG else None)


def known(value: Callable[[], T], otherwise: T) -> T:
    """Return what a function returns, or something else if it raises."""
    with harmless(logging.DEBUG):
        return value()
    return otherwise
