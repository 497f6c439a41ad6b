"""Where the messages of a run go: its log file, which never ends the run, and the console."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from modelzoo_trainer.base.secrets import hide_in_text

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.logging")

_PACKAGE: Final = logging.getLogger("modelzoo_trainer")
_FORMAT: Final = "%(asctime)s %(levelname)s: %(message)s"


def open_handlers(trainer: Trainer, log_level: str, stack: ExitStack) -> None:
    """Write messages to `run.log` and the console until the stack is closed."""
    path = trainer.artifact_dir / "run.log"
    names = [getattr(handler, "baseFilename", None) for handler in _PACKAGE.handlers]
    if str(path.absolute()) in names:
        return
    if not trainer.backend.comm.is_main:
        _open_other(trainer.backend.comm.rank, stack)
        return
    if not _PACKAGE.hasHandlers():
        _add(_console(is_quiet=trainer.progress == "none"), stack)
    _set_level(log_level, stack)
    run_log = RunLog(path)
    run_log.setFormatter(logging.Formatter(_FORMAT))
    _add(run_log, stack)


def _open_other(rank: int, stack: ExitStack) -> None:
    """Write errors of other processes than the main one to standard error, with the rank.

    A program with handlers of its own, as Ray's workers are, also gets warnings, but not the
    lines that the main process logs for all.
    """
    if _PACKAGE.hasHandlers():
        _set_level(logging.WARNING, stack)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.ERROR)
    handler.setFormatter(logging.Formatter(f"process {rank}: {_FORMAT}"))
    _add(handler, stack)


def _set_level(level: int | str, stack: ExitStack) -> None:
    """Set the level until the stack is closed, unless the program has set one."""
    if _PACKAGE.level == logging.NOTSET:
        _PACKAGE.setLevel(level)
        stack.callback(_PACKAGE.setLevel, logging.NOTSET)


def _add(handler: logging.Handler, stack: ExitStack) -> None:
    """Add a handler until the stack is closed."""
    _PACKAGE.addHandler(handler)
    stack.callback(handler.close)
    stack.callback(_PACKAGE.removeHandler, handler)


class _ConsoleFormat(logging.Formatter):
    """Prefix warnings and errors with their level."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{record.levelname}: {text}" if record.levelno >= logging.WARNING else text


def _console(*, is_quiet: bool) -> logging.Handler:
    """Return a handler for standard error; a quiet one writes only warnings and errors.

    Also writes the messages of progress callbacks.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_ConsoleFormat("%(message)s"))
    if is_quiet:
        progress = f"{_PACKAGE.name}.progress"
        handler.addFilter(lambda one: one.levelno >= logging.WARNING or one.name == progress)
    return handler


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
