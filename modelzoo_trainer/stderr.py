"""Standard error, as a run writes to it: it neither fails nor waits for a reader who is gone."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from typing import Final

DESCRIPTOR: Final = 2
_PATIENCE_S: Final = 1.0
_PIECE: Final = getattr(select, "PIPE_BUF", 512)  # a pipe that is ready takes so many bytes at once


def say(line: str) -> None:
    """Write a line; what cannot be written is dropped.

    Args:
        line: Without its end.
    """
    stream = sys.stderr
    with suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
        try:
            descriptor = stream.fileno()
        except OSError:  # a notebook's, which has no descriptor
            stream.write(f"{line}\n")
        else:
            write(f"{line}\n", descriptor)


def write(text: str, descriptor: int = DESCRIPTOR, *, patience_s: float = _PATIENCE_S) -> None:
    """Write to a descriptor without taking a lock; what cannot be written is dropped.

    Args:
        text: The text.
        descriptor: Of a file, a pipe or a terminal.
        patience_s: Seconds to wait for it, for each few hundred bytes.
    """
    data = text.encode(errors="backslashreplace")
    with suppress(OSError, ValueError):
        while data and _takes_more(descriptor, patience_s):
            data = data[os.write(descriptor, data[:_PIECE]) :]


def _takes_more(descriptor: int, patience_s: float) -> bool:
    if os.name != "posix":  # select knows sockets only
        return True
    return bool(select.select([], [descriptor], [], patience_s)[1])


def open_missing_streams() -> None:
    """Give a process that was started with standard streams closed empty ones.

    The next files that it opens would take their numbers, and get what is written to them.
    """
    opened = -1
    while opened <= DESCRIPTOR:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened <= DESCRIPTOR:
            os.set_inheritable(opened, True)
    os.close(opened)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115
