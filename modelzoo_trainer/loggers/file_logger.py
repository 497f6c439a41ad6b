"""Base class of loggers that write one file, which is truncated when a run resumes."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import xxhash
from typing_extensions import override

from modelzoo_trainer.base.regular_files import open_regular, require_regular
from modelzoo_trainer.callback import Loader, Metrics, StateDict
from modelzoo_trainer.core.parts.results_log import scopes_of
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.logger import Logger

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.jsonl")

_STEP: Final = re.compile(rb'\{"step": (\d+), "time": ')
_TAIL_BYTES: Final = 1 << 16
_END_BYTES: Final = 1 << 20


def mark(path: Path) -> dict[str, Any]:
    """Return the end of a file, for `cut_to`: its length and a digest.

    Returns:
        `num_bytes`, and `tail`, the digest of at most the last 64 KiB. `num_bytes` is None if
        the path is not a regular file, or the last line is incomplete.
    """
    nowhere = {"num_bytes": None, "tail": ""}
    if path.exists() and not path.is_file():  # a pipe or device has no past
        return nowhere
    try:
        with open_regular(path) as file:
            num_bytes = file.seek(0, os.SEEK_END)
            tail = _before(file, num_bytes)
    except FileNotFoundError:
        return {"num_bytes": 0, "tail": _digest(b"")}
    except OSError:
        return nowhere
    if tail and not tail.endswith(b"\n"):
        return nowhere
    return {"num_bytes": num_bytes, "tail": _digest(tail)}


def cut_to(path: Path, place: dict[str, Any], kept: bytes = b"") -> bool:
    """Truncate a file to a mark, if it is the marked one; return whether it is.

    `kept`: the lines after the mark that stay. An empty file cannot be identified, so it never is.
    """
    num_bytes = place.get("num_bytes")
    if not num_bytes or not path.is_file():
        return False
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if size < num_bytes or _digest(_before(file, num_bytes)) != place.get("tail"):
            return False
        end = num_bytes + len(kept)
        if size > end or kept:
            file.truncate(num_bytes)
            file.seek(num_bytes)
            file.write(kept)
            file.flush()
            os.fsync(file.fileno())
        if size > end:
            log.info("Truncated %s from %d to %d bytes.", path, size, end)
    return True


def _before(file: IO[bytes], end: int) -> bytes:
    start = max(0, end - _TAIL_BYTES)
    file.seek(start)
    return file.read(end - start)


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def cut_back(path: Path, step: int) -> None:
    """Remove the lines of later steps and invalid lines, atomically.

    `path`: the file; no-op if it does not exist.
    """
    if not path.is_file():  # a pipe or device has no past
        return
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    num_cut = 0
    with open_regular(path) as lines, fresh.open("xb") as kept:
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
    """Rename a file to a name with the time, and return that.

    `path`: the file; returns None if it is empty or does not exist.
    """
    if not path.is_file() or path.stat().st_size == 0:  # a pipe or device has no past
        return None
    stem = aside = f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while (fresh := path.with_name(aside + path.suffix)).exists():
        number += 1
        aside = f"{stem}_{number}"
    return path.rename(fresh)


def lines_from(path: Path, start: int, step: int, stop: int | None = None) -> list[bytes]:
    """Return the lines of a file from an offset, up to another, without lines of later steps."""
    if not path.is_file():
        return []
    with open_regular(path) as file:
        file.seek(start)
        lines = file.read(-1 if stop is None else max(0, stop - start)).splitlines(keepends=True)
    found = [(_step_of(line), line) for line in lines]
    return [line for own, line in found if own is not None and own <= step]


def is_test(names: Iterable[str]) -> bool:
    """Return whether metrics belong to `trainer.test`, which a resumed fit does not repeat."""
    names = set(names) - {"step", "time"}
    return bool(names) and all(name.startswith("test/") for name in names)


def end_last_line(path: Path) -> None:
    """Remove an incomplete last line; complete one that only lacks its newline.

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
    """Return the step of a line: None if incomplete, -inf if written by something else."""
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


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that a fit may resume from."""

    step: int
    place: dict[str, Any] | None
    """The end of the file when it was written."""
    since: Any
    """The end of the file when it, or one before it, was loaded."""
    repeats_tests: bool
    """Whether a fit logs metrics that are named like metrics of `trainer.test`."""


class FileLogger(Logger):
    """Base class of loggers that write one file.

    Lines are written within about a second. If the file cannot be written, a warning is logged
    once, and the run continues.

    Args:
        path: The file; None = `file_name` in `model_dir`.
        file_name: The default name.
        log: The Python logger for messages.

    Raises:
        ConfigError: At set-up, if another logger writes the file, or it is a named pipe, a socket
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
        self._loaded: LoadedCheckpoint | None = None
        self._kept_tests: list[tuple[int, dict[str, str]]] = []
        """Results of tests that were kept when the run resumed, with their steps."""
        self._is_own = False
        """Whether the file has only lines of this logger."""

    @override
    def setup(self, trainer: Trainer) -> None:
        self._path = path = self._given or trainer.model_dir / self._file_name
        require_regular(path, allow_device=self._given is not None)
        for other in trainer.loggers:
            if other is not self and isinstance(other, FileLogger) and other.is_at(path):
                raise ConfigError(
                    f"loggers: {other.name} and {self.name} both write to {str(path)!r}. Give one "
                    f"of them another path."
                )

    def is_at(self, path: Path) -> bool:
        """Return whether a path is the file's, once set up."""
        return self._path is not None and self._path.absolute() == path.absolute()

    # ---- for subclasses

    @abstractmethod
    def _write(self, path: Path, lines: list[Line]) -> None:
        """Append lines to the file."""

    @abstractmethod
    def _close(self) -> None:
        """Close the file, so that it can be replaced."""

    @abstractmethod
    def _mark(self, path: Path) -> dict[str, Any]:
        """Return the end of the file."""

    @abstractmethod
    def _since(self, place: dict[str, Any]) -> Any:
        """Return the part of a mark that identifies what was written after it."""

    @abstractmethod
    def _cut(self, path: Path, loaded: LoadedCheckpoint) -> None:
        """Truncate the file to a checkpoint; keep tests, and what was written since the load."""

    # ---- lines

    @override
    def log_metrics(self, metrics: Metrics, step: int) -> None:
        if self._has_failed or (self._kept_tests and self._repeats_test(metrics, step)):
            return
        # Written together later: many lines cost hardly more than one.
        now = time.time()
        self._lines.append((metrics, step, now))
        if now - self._flushed >= FLUSH_INTERVAL_S:
            self._flushed = now
            self.flush()

    def _repeats_test(self, metrics: Metrics, step: int) -> bool:
        """Return whether it is a kept result, which a callback of the resumed fit repeats."""
        found = step, {str(name): str(value) for name, value in metrics.items()}
        is_kept = found in self._kept_tests
        if is_kept:
            self._kept_tests.remove(found)
        return is_kept

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
            self._log.warning("Cannot write %s, so metrics are lost: %s", self._path, error)
        self._has_failed = True
        with suppress(OSError):  # reported already
            self._close()

    # ---- resuming

    def state_dict(self) -> dict[str, Any]:
        """Flush, and return the end of the file."""
        self.flush()
        return {} if self._path is None else self._mark(self._path)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the end of the file at the checkpoint."""
        self._place = state

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        place, self._place = self._place, None
        if not trainer.backend.comm.is_main:
            return
        if "global_step" in state_dict:
            since = self._since(self.state_dict()) if self._loaded is None else self._loaded.since
            repeats_tests = "test" in scopes_of(trainer)
            self._loaded = LoadedCheckpoint(trainer.global_step, place, since, repeats_tests)
        if trainer.is_resuming:  # a validation of a checkpoint does not truncate the file
            self._go_back(trainer)

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        if trainer.is_resuming and ckpt_path is None and trainer.backend.comm.is_main:
            self._go_back(trainer)

    def _go_back(self, trainer: Trainer) -> None:
        """Truncate or rename the file to match the current step."""
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
                "New run (step 0): moved the metrics of the previous run from %s to %s.",
                path,
                aside.name,
            )

    # ---- when

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        stack.callback(self.flush)
