"""Warnings, and why a run ended, from `run.log`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from modelzoo_trainer.base.regular_files import open_regular
from modelzoo_trainer.base.secrets import hide_in_text

RUN_LOG: Final = "run.log"
HINT: Final = "HINT"
"""The level of hints in `run.json`."""
_MAX_BYTES: Final = 2_000_000  # at the start, and at the end of the file
_LONGEST: Final = 400  # characters
_RECORD: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ ([A-Z]+): (.*)")
_STOPPED: Final = re.compile(r"Stopped \((.+)\) at step \d+")
_SHOWN: Final = ("WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, slots=True)
class LoggedMessage:
    """A warning or an error of a run."""

    level: str
    text: str
    when: str = ""
    """Its local time on the host of the run; "" = not known."""
    num: int = 1
    """How often it was logged."""
    folder: str = ""
    """The folder of logs, if nothing was trained there."""


def read_log(folder: Path, inside: Path) -> tuple[list[LoggedMessage], str]:
    """Return the warnings and errors in `run.log`, and what stopped the run early; "" = nothing.

    `inside`: the folder of the run; links that lead out of it are not followed.
    """
    found: dict[tuple[str, str], LoggedMessage] = {}
    stopped = ""
    for when, level, line in _records(folder / RUN_LOG, inside):
        text = hide_in_text(line[:_LONGEST])
        if level in _SHOWN:
            before = found.get((level, text))
            num = 1 if before is None else before.num + 1
            found[level, text] = LoggedMessage(level, text, before.when if before else when, num)
        match = _STOPPED.match(text)
        if match is not None:
            stopped = match[1]
        elif line.startswith("Finished at step"):
            stopped = ""
    return list(found.values()), stopped


def _records(path: Path, inside: Path) -> Iterator[tuple[str, str, str]]:
    """Yield time, level and first line of each message."""
    for line in _lines(path, inside):
        match = _RECORD.match(line)
        if match is not None:
            yield match[1], match[2], match[3]


def _lines(path: Path, inside: Path) -> Iterable[str]:
    """Return the lines of a file; of a very long one those at its start and end."""
    try:
        with open_regular(path, inside=inside) as file:
            content = file.read(_MAX_BYTES)
            size = path.stat().st_size
            if size > _MAX_BYTES:
                file.seek(max(_MAX_BYTES, size - _MAX_BYTES))
                content += b"\n" + file.read(_MAX_BYTES)
    except OSError:
        return []
    return content.decode(errors="replace").splitlines()
