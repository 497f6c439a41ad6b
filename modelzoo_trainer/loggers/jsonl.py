"""Metrics in a text file: one JSON object a line."""

from __future__ import annotations

import json
import logging
import math
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.callback import Loader, Metrics, StateDict
from modelzoo_trainer.loggers.line_file import (
    cut_back,
    cut_to,
    end_last_line,
    lines_from,
    mark,
    put_aside,
)
from modelzoo_trainer.loggers.logger import Logger

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.jsonl")

MAX_ELEMENTS: Final = 1000
FLUSH_INTERVAL_S: Final = 1.0
_OWN_KEYS: Final = ("step", "time")
_encode: Final = json.JSONEncoder(allow_nan=False).encode
_SKIPPED: Final = object()


class _Loaded(NamedTuple):
    """A checkpoint that a fit may go on from."""

    step: int
    place: dict[str, Any] | None
    """Where the file ended when it was made."""
    since: int | None
    """Where the file ended when it was loaded, or one that was loaded before."""


class JsonlLogger(Logger):
    """Appends metrics to a file, a line for each delivery.

    A line is `{"step": 20, "time": 1735689600.0, "loss": 2.31, ...}`; `time` is in seconds since
    1970. Numbers that are not finite are the strings "nan", "inf" and "-inf". Tensors are nested
    lists; those of more than 1000 elements are left out. Lines reach the file at most about a
    second later. A run that resumes first cuts the file back to where it was when the checkpoint
    was made; of another file it removes the lines of the steps that it will take again. What this
    process has validated since it loaded the checkpoint stays. A run that begins at step 0 gives a
    file with lines of others another name, `metrics-<time>.jsonl`.

    A file that cannot be written is logged once, and the run goes on without it.

    Args:
        path: The file; None = `metrics.jsonl` in `model_dir`.

    State: The length of the file, with a digest of its end.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._given = None if path is None else Path(path)
        self._path: Path | None = None
        self._file: IO[str] | None = None
        self._lines: list[tuple[Metrics, int, float]] = []
        self._flushed = 0.0
        self._has_failed = False
        self._place: dict[str, Any] | None = None
        self._loaded: _Loaded | None = None
        self._is_own = False

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
        end_last_line(self._path)
        is_empty = not (self._path.is_file() and self._path.stat().st_size)
        self._is_own = self._is_own or is_empty
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

    # ---- going back

    def state_dict(self) -> dict[str, Any]:
        """Return where the file ends, with all lines so far in it."""
        self.flush()
        return {"num_bytes": None, "tail": ""} if self._path is None else mark(self._path)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep where the file ended, for when it is to be cut back."""
        self._place = state

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        place, self._place = self._place, None
        if not trainer.backend.is_main:
            return
        if "global_step" in state_dict:
            since = self.state_dict()["num_bytes"] if self._loaded is None else self._loaded.since
            self._loaded = _Loaded(trainer.global_step, place, since)
        if trainer.is_resuming:  # a validation of an older checkpoint takes nothing back
            self._go_back(trainer)

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        if trainer.is_resuming and ckpt_path is None and trainer.backend.is_main:
            self._go_back(trainer)

    def _go_back(self, trainer: Trainer) -> None:
        """Make the file that of a run which is where the trainer is now."""
        assert self._path is not None  # set at set-up
        loaded, self._loaded = self._loaded, None
        try:
            if loaded is not None and loaded.step == trainer.global_step:
                self.finalize()
                _cut(self._path, loaded)
            elif trainer.global_step == 0 and not self._is_own:
                self.finalize()
                self._put_aside(self._path)
        except OSError as error:
            self._fail(error)

    def _put_aside(self, path: Path) -> None:
        aside = put_aside(path)
        if aside is not None:
            log.warning(
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


def _cut(path: Path, loaded: _Loaded) -> None:
    """Cut a file back to a checkpoint; what was written after that was loaded stays."""
    own = b""
    if loaded.since is not None and loaded.place is not None:
        start = max(loaded.since, loaded.place.get("num_bytes") or 0)
        own = lines_from(path, start, loaded.step)
    if loaded.place is None or not cut_to(path, loaded.place):
        log.debug("%s is not as the checkpoint knows it, or was empty then.", path)
        cut_back(path, loaded.step)
    elif own:
        with path.open("ab") as file:
            file.write(own)


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
