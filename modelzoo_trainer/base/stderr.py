"""Standard error for a run: writing neither fails nor blocks if the reader has gone."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from typing import Final

DESCRIPTOR: Final = 2
_PATIENCE_S: Final = 1.0
_PIECE: Final = getattr(select, "PIPE_BUF", 512)  # bytes that a ready pipe accepts at once


def say(line: str) -> None:
    """Write a line; drop what cannot be written.

    Args:
        line: Without a newline.
    """
    stream = sys.stderr
    with suppress(AttributeError, OSError, ValueError):  # there is no stderr, or it is closed
        try:
            descriptor = stream.fileno()
        except OSError:  # in a notebook, without a descriptor
            stream.write(f"{line}\n")
        else:
            write(f"{line}\n", descriptor)


def write(text: str, descriptor: int = DESCRIPTOR, *, patience_s: float = _PATIENCE_S) -> None:
    """Write to a descriptor without taking a lock; drop what cannot be written.

    Args:
        text: The text.
        descriptor: Of a file, a pipe or a terminal.
        patience_s: Timeout in seconds for each few hundred bytes.
    """
    data = text.encode(errors="backslashreplace")
    with suppress(OSError, ValueError):
        while data and _takes_more(descriptor, patience_s):
            data = data[os.write(descriptor, data[:_PIECE]) :]


def _takes_more(descriptor: int, patience_s: float) -> bool:
    if os.name != "posix":  # select supports only sockets
        return True
    return bool(select.select([], [descriptor], [], patience_s)[1])


def open_missing_streams() -> None:
    """Open the null device for standard streams that are closed.

    Otherwise the next opened files would get their descriptors, and what is written to them.
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
