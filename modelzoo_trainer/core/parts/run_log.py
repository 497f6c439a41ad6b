"""The log file of a run, which never ends the run."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

from typing_extensions import override

from modelzoo_trainer.base.secrets import hide_in_text

log = logging.getLogger("modelzoo_trainer.logging")


class RunLog(logging.FileHandler):
    """Write messages to a file, opened with the first one; recreate its folder if it was removed.

    If the file cannot be written, as on a full disk, one warning goes to the other handlers, and
    further messages are not written. What has the form of a secret is hidden.
    """

    def __init__(self, path: Path) -> None:
        # A path that is not valid UTF-8 has characters that cannot be encoded.
        super().__init__(path, encoding="utf-8", errors="backslashreplace", delay=True)
        self._has_failed = False

    @override
    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return open(  # closed by `close`
            self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=_opened
        )

    @override
    def format(self, record: logging.LogRecord) -> str:
        return hide_in_text(super().format(record))

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if self._has_failed:
            return
        try:
            super().emit(record)
        except OSError as error:  # opening it
            self._fail(error)

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._fail(error)
        else:  # in the call that logs
            super().handleError(record)

    @override
    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # writing the rest
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if self._has_failed:
            return
        self._has_failed = True  # first: the warning reaches this handler, too
        stream, self.stream = self.stream, None  # as before it is opened
        if stream is not None:
            with suppress(OSError):  # it writes the rest
                stream.close()
        log.warning(
            "Cannot write %s: %s. Training continues; further messages are not written there.",
            self.baseFilename,
            error.strerror or error,
        )


def _opened(path: str, flags: int) -> int:
    """Open a file without waiting for the reader of a named pipe."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)
