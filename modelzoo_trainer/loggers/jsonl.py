"""Metrics in a text file: one JSON object a line."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.callback import Loader, Metrics, StateDict
from modelzoo_trainer.loggers.logger import Logger

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.jsonl")

MAX_ELEMENTS: Final = 1000
FLUSH_INTERVAL_S: Final = 1.0
_OWN_KEYS: Final = ("step", "time")
_STEP: Final = re.compile(rb'\{"step": (\d+), "time": ')
_encode: Final = json.JSONEncoder(allow_nan=False).encode
_SKIPPED: Final = object()


class JsonlLogger(Logger):
    """Appends metrics to a file, a line for each delivery.

    A line is `{"step": 20, "time": 1735689600.0, "loss": 2.31, ...}`; `time` is in seconds since
    1970. Numbers that are not finite are the strings "nan", "inf" and "-inf". Tensors are nested
    lists; those of more than 1000 elements are left out. Lines reach the file at most about a
    second later. A run that resumes first removes the lines of the steps that it will take again.

    A file that cannot be written is logged once, and the run goes on without it.

    Args:
        path: The file; None = `metrics.jsonl` in `model_dir`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._given = None if path is None else Path(path)
        self._path: Path | None = None
        self._file: IO[str] | None = None
        self._lines: list[tuple[Metrics, int, float]] = []
        self._flushed = 0.0
        self._has_failed = False
        self._is_resuming = False

    @override
    def setup(self, trainer: Trainer) -> None:
        self._path = self._given or trainer.model_dir / "metrics.jsonl"

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

    def _open(self) -> IO[str]:
        assert self._path is not None  # set at set-up
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(self._path)
        return self._path.open("a", encoding="utf-8", newline="\n")

    @override
    def flush(self) -> None:
        lines, self._lines = self._lines, []
        if not lines or self._has_failed:
            return
        try:
            if self._file is None:
                self._file = self._open()
            self._file.write("".join(to_line(*line) for line in lines))
            self._file.flush()
        except OSError as error:
            self._fail(error)

    @override
    def finalize(self) -> None:
        self.flush()
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            log.warning("%s cannot be written, metrics are lost: %s", self._path, error)
        self._has_failed = True
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # told already
                file.close()

    # ---- when

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._is_resuming = True

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        # A validation of an older checkpoint takes nothing back.
        if self._is_resuming and "global_step" in state_dict and trainer.backend.is_main:
            assert self._path is not None  # set at set-up
            self.finalize()
            try:
                cut_back(self._path, trainer.global_step)
            except OSError as error:
                self._fail(error)

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._is_resuming = False

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        stack.callback(self.flush)


def to_line(metrics: Metrics, step: int, now: float) -> str:
    """Return metrics as a line of JSON; metrics called "step" or "time" get an underscore."""
    if "step" in metrics or "time" in metrics:
        metrics = {f"{k}_" if k in _OWN_KEYS else k: v for k, v in metrics.items()}
    record = {"step": step, "time": now, **metrics}
    try:
        return _encode(record) + "\n"
    except (TypeError, ValueError):
        plain = {str(name): to_plain(value) for name, value in record.items()}
        return _encode({k: v for k, v in plain.items() if v is not _SKIPPED}) + "\n"


def to_plain(value: Any) -> Any:
    """Return a value as JSON has it, or a mark that it is to be left out."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        size = value.numel() if isinstance(value, Tensor) else value.size
        return to_plain(value.tolist()) if size <= MAX_ELEMENTS else _SKIPPED
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [to_plain(item) for item in value]
        return [item for item in items if item is not _SKIPPED]
    return _SKIPPED


def cut_back(path: Path, step: int) -> None:
    """Remove the lines of later steps, and any that is not whole, at once or not at all.

    Args:
        path: The file; nothing happens if it is not there.
        step: The last one to keep.
    """
    if not path.is_file():  # a pipe or device has no past
        return
    fresh = path.with_name(f".{path.name}.new")
    num_cut = 0
    with path.open("rb") as lines, fresh.open("wb") as kept:
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


def _end_last_line(path: Path) -> None:
    """Remove a last line that a crash cut off; end one that only lacks its newline."""
    if not path.is_file():  # a pipe or device has no past
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - (1 << 20))
        file.seek(start)
        tail = file.read()
        if not tail or tail.endswith(b"\n"):
            return
        last = tail[tail.rfind(b"\n") + 1 :]
        if _step_of(last) is None:
            file.truncate(size - len(last))
        else:
            file.write(b"\n")
