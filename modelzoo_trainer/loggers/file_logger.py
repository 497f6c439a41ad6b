"""A logger whose metrics are in one file, which is cut back when a run goes back."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from abc import abstractmethod
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import xxhash
from typing_extensions import override

from modelzoo_trainer.callback import Loader, Metrics, StateDict
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loggers.logger import Logger
from modelzoo_trainer.regular_files import require_regular

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.jsonl")

_STEP: Final = re.compile(rb'\{"step": (\d+), "time": ')
_TAIL_BYTES: Final = 1 << 16
_END_BYTES: Final = 1 << 20


def mark(path: Path) -> dict[str, Any]:
    """Return where a file ends, to cut it back to: its length, and a digest of what is before.

    Returns:
        `num_bytes`, and `tail`, the digest of at most the last 64 KiB. `num_bytes` is None if
        there is no way back: the file is none, or does not end with a line.
    """
    nowhere = {"num_bytes": None, "tail": ""}
    if path.exists() and not path.is_file():  # a pipe or device has no past
        return nowhere
    try:
        with path.open("rb") as file:
            num_bytes = file.seek(0, os.SEEK_END)
            tail = _before(file, num_bytes)
    except FileNotFoundError:
        return {"num_bytes": 0, "tail": _digest(b"")}
    except OSError:
        return nowhere
    if tail and not tail.endswith(b"\n"):
        return nowhere
    return {"num_bytes": num_bytes, "tail": _digest(tail)}


def cut_to(path: Path, place: dict[str, Any]) -> bool:
    """Cut a file back in place, if it is the one that was marked; return whether it was.

    An empty file cannot be told from others, so it is never taken for the one that was marked.
    """
    num_bytes = place.get("num_bytes")
    if not num_bytes or not path.is_file():
        return False
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if size < num_bytes or _digest(_before(file, num_bytes)) != place.get("tail"):
            return False
        if size > num_bytes:
            file.truncate(num_bytes)
            os.fsync(file.fileno())
            log.info("Cut %s back from %d to %d bytes.", path, size, num_bytes)
    return True


def _before(file: IO[bytes], end: int) -> bytes:
    start = max(0, end - _TAIL_BYTES)
    file.seek(start)
    return file.read(end - start)


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def cut_back(path: Path, step: int) -> None:
    """Remove the lines of later steps, and any that is not whole, at once or not at all.

    `path`: the file; no-op if it does not exist.
    """
    if not path.is_file():  # a pipe or device has no past
        return
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    num_cut = 0
    with path.open("rb") as lines, fresh.open("xb") as kept:
        for line in lines:
            found = _step_of(line)
            if found is None or found > step:
                num_cut += 1
            else:
                kept.write(line)
        kept.flush()
        os.fsync(kept.fileno())
    if num_cut:
        fresh.replace(path)
        log.info("Removed %d lines after step %d from %s.", num_cut, step, path)
    else:
        fresh.unlink()


def put_aside(path: Path) -> Path | None:
    """Give a file another name, with the time in it, and return that.

    `path`: the file; no-op that returns None if it is empty or does not exist.
    """
    if not path.is_file() or path.stat().st_size == 0:  # a pipe or device has no past
        return None
    stem = aside = f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while (fresh := path.with_name(aside + path.suffix)).exists():
        number += 1
        aside = f"{stem}_{number}"
    return path.rename(fresh)


def lines_from(path: Path, start: int, step: int) -> bytes:
    """Return the lines of a file from a place on, without those of later steps."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        file.seek(start)
        found = [(_step_of(line), line) for line in file]
    return b"".join(line for own, line in found if own is not None and own <= step)


def end_last_line(path: Path) -> None:
    """Remove a last line that a crash cut off; end one that only lacks its newline.

    `path`: the file; no-op if it does not exist.
    """
    if not path.is_file():  # a pipe or device has no past
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - _END_BYTES)
        file.seek(start)
        tail = file.read()
        if not tail or tail.endswith(b"\n"):
            return
        last = tail[tail.rfind(b"\n") + 1 :]
        if _step_of(last) is None:
            file.truncate(size - len(last))
        else:
            file.write(b"\n")


def _step_of(line: bytes) -> float | None:
    """Return the step of a line: none if it is not whole, before all if it is another's."""
    match = _STEP.match(line)
    if match is not None and line.endswith(b"}\n"):
        return int(match[1])
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else -math.inf


FLUSH_INTERVAL_S: Final = 1.0

Line = tuple[Metrics, int, float]


class Loaded(NamedTuple):
    """A checkpoint that a fit may resume from."""

    step: int
    place: dict[str, Any] | None
    """Where the file ended when it was made."""
    since: Any
    """Where the file ended when it was loaded, or one that was loaded before."""


class FileLogger(Logger):
    """What loggers with a file of their own have in common.

    Lines reach the file at most about a second later. A file that cannot be written is logged
    once, and the run continues without it.

    Args:
        path: The file; None = one of a fixed name in `model_dir`.
        file_name: That name.
        log: Where messages go.

    Raises:
        ConfigError: At set-up, if another logger writes that file, or it is a named pipe, a socket
            or, in `model_dir`, a device.
    """

    def __init__(self, path: Path | None, file_name: str, log: logging.Logger) -> None:
        self._given = None if path is None else Path(path)
        self._file_name = file_name
        self._log = log
        self._path: Path | None = None
        self._lines: list[Line] = []
        self._flushed = 0.0
        self._has_failed = False
        self._place: dict[str, Any] | None = None
        self._loaded: Loaded | None = None
        self._is_own = False
        """Whether all that is in the file is of this logger."""

    @override
    def setup(self, trainer: Trainer) -> None:
        self._path = path = self._given or trainer.model_dir / self._file_name
        require_regular(path, allow_device=self._given is not None)
        for other in trainer.loggers:
            if other is not self and isinstance(other, FileLogger) and other.is_at(path):
                raise ConfigError(
                    f"loggers has two that write {str(path)!r}: {other.name} and {self.name}. Give "
                    f"one of them another path."
                )

    def is_at(self, path: Path) -> bool:
        """Return whether a path is that of the file, which set-up decides."""
        return self._path is not None and self._path.absolute() == path.absolute()

    # ---- what a kind of file decides

    @abstractmethod
    def _write(self, path: Path, lines: list[Line]) -> None:
        """Append lines to the file."""

    @abstractmethod
    def _close(self) -> None:
        """Close the file, so that others may change it."""

    @abstractmethod
    def _mark(self, path: Path) -> dict[str, Any]:
        """Return where the file ends."""

    @abstractmethod
    def _since(self, place: dict[str, Any]) -> Any:
        """Return what of a place is needed to find what was written after it."""

    @abstractmethod
    def _cut(self, path: Path, loaded: Loaded) -> None:
        """Cut the file back to a checkpoint; what was written after that was loaded stays."""

    # ---- lines

    @override
    def log_metrics(self, metrics: Metrics, step: int) -> None:
        if self._has_failed:
            return
        # Written in one go later: many lines cost hardly more than one.
        now = time.time()
        self._lines.append((metrics, step, now))
        if now - self._flushed >= FLUSH_INTERVAL_S:
            self._flushed = now
            self.flush()

    @override
    def flush(self) -> None:
        lines, self._lines = self._lines, []
        if not lines or self._has_failed:
            return
        assert self._path is not None  # set at set-up
        try:
            self._write(self._path, lines)
        except (OSError, UnicodeError) as error:
            self._fail(error)

    @override
    def finalize(self) -> None:
        self.flush()
        try:
            self._close()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError | UnicodeError) -> None:
        if not self._has_failed:
            self._log.warning("%s cannot be written, metrics are lost: %s", self._path, error)
        self._has_failed = True
        with suppress(OSError):  # reported already
            self._close()

    # ---- going back

    def state_dict(self) -> dict[str, Any]:
        """Return where the file ends, with all lines so far in it."""
        self.flush()
        return {} if self._path is None else self._mark(self._path)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep where the file ended, for when it is to be cut back."""
        self._place = state

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        place, self._place = self._place, None
        if not trainer.backend.comm.is_main:
            return
        if "global_step" in state_dict:
            since = self._since(self.state_dict()) if self._loaded is None else self._loaded.since
            self._loaded = Loaded(trainer.global_step, place, since)
        if trainer.is_resuming:  # a validation of an older checkpoint takes nothing back
            self._go_back(trainer)

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        if trainer.is_resuming and ckpt_path is None and trainer.backend.comm.is_main:
            self._go_back(trainer)

    def _go_back(self, trainer: Trainer) -> None:
        """Make the file that of a run which is where the trainer is now."""
        assert self._path is not None  # set at set-up
        loaded, self._loaded = self._loaded, None
        try:
            if loaded is not None and loaded.step == trainer.global_step:
                self.finalize()
                self._cut(self._path, loaded)
            elif trainer.global_step == 0 and not self._is_own:
                self.finalize()
                self._put_aside(self._path)
        except (OSError, UnicodeError) as error:
            self._fail(error)

    def _put_aside(self, path: Path) -> None:
        aside = put_aside(path)
        if aside is not None:
            self._log.warning(
                "The run begins at step 0: the metrics of an earlier one, %s, are now %s.",
                path,
                aside.name,
            )

    # ---- when

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        stack.callback(self.flush)
