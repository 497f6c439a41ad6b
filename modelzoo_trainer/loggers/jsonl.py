"""Metrics in a JSON Lines file."""

from __future__ import annotations

import json
import logging
import math
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Loader, Metrics, StateDict
from modelzoo_trainer.loggers.file_logger import (
    FileLogger,
    Line,
    LoadedCheckpoint,
    cut_back,
    cut_to,
    end_last_line,
    is_test,
    lines_from,
    mark,
)
from modelzoo_trainer.loggers.run_record import RunRecord

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.jsonl")

MAX_ELEMENTS: Final = 1000
_OWN_KEYS: Final = ("step", "time")
_encode: Final = json.JSONEncoder(allow_nan=False).encode
_BETWEEN: Final = "}, {"
_AT_ONCE: Final = 64  # lines that are encoded together; more would not stay in a processor's cache
_SKIPPED: Final = object()


class JsonlLogger(FileLogger):
    """Append metrics to a JSON Lines file, one line per log step.

    A line is `{"step": 20, "time": 1735689600.0, "loss": 2.31, ...}`; `time` is in seconds since
    1970. Non-finite numbers are the strings "nan", "inf" and "-inf". Tensors are nested lists;
    tensors of more than 1000 elements are dropped. Lines are written within about a second.

    A resumed run first truncates the file to its state at the checkpoint; from another file it
    removes the lines of steps that it will repeat. Results of `trainer.test`, and validations since
    the checkpoint was loaded, are kept. A run that starts at step 0 renames a file of an earlier
    run to `metrics-<time>.jsonl`.

    For `modelzoo-trainer report` it also writes to `logs/<time>` the environment, the settings and
    the numbers of batches (`run.json`), and the times of training, validations and checkpoints,
    with the memory used (`events.jsonl`).

    If a file cannot be written, a warning is logged once, and the run continues.

    Args:
        path: The file; None = `metrics.jsonl` in `model_dir`.

    State: The length of the file, and a digest of its end.

    Raises:
        ConfigError: At set-up, if another logger writes the file, or it is a named pipe, a socket
            or, in `model_dir`, a device.
    """

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path, "metrics.jsonl", log)
        self._file: IO[str] | None = None
        self._record: RunRecord | None = None

    @override
    def _write(self, path: Path, lines: list[Line]) -> None:
        if self._file is None:
            self._file = self._open(path)
        for first in range(0, len(lines), _AT_ONCE):
            self._file.write(to_lines(lines[first : first + _AT_ONCE]))
        self._file.flush()
        if self._record is not None:
            self._record.sample_memory(*lines[-1][1:])

    def _open(self, path: Path) -> IO[str]:
        path.parent.mkdir(parents=True, exist_ok=True)
        end_last_line(path)
        is_empty = not (path.is_file() and path.stat().st_size)
        self._is_own = self._is_own or is_empty
        return path.open("a", encoding="utf-8", newline="\n")

    @override
    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @override
    def _mark(self, path: Path) -> dict[str, Any]:
        return mark(path)

    @override
    def _since(self, place: dict[str, Any]) -> Any:
        return place.get("num_bytes")

    @override
    def _cut(self, path: Path, loaded: LoadedCheckpoint) -> None:
        tests, own = ([], []) if loaded.place is None else _kept(path, loaded)
        if loaded.place is not None and cut_to(path, loaded.place, b"".join(tests + own)):
            self._kept_tests = list(map(_result_in, tests))
        else:
            log.debug("%s: removing the lines after step %d.", path, loaded.step)
            cut_back(path, loaded.step)

    # ---- events for the report

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._begin_record(trainer, stack, "fit", train_dataloader)

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        if self._record is None:
            self._begin_record(trainer, stack, "validate", val_dataloader)
        super().on_enter_validate(trainer, stack, val_dataloader, loop)
        stack.callback(self._note_validation, trainer, time.time())

    def _begin_record(self, trainer: Trainer, stack: ExitStack, kind: str, loader: Loader) -> None:
        """Record events until the stack is closed."""
        if not trainer.backend.comm.is_main or not trainer.backend.caps.holds_values:
            return
        record = self._record = RunRecord(trainer)

        def leave(kind: object, error: BaseException | None, rest: object) -> None:
            self._record = None
            record.end(trainer, error)

        stack.push(leave)
        record.begin(trainer, kind, loader)

    def _note_validation(self, trainer: Trainer, began: float) -> None:
        if self._record is not None:
            step = trainer.global_step
            self._record.note("validate", step, began, seconds=time.time() - began)
            self._record.flush()

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        if self._record is not None:
            self._record.begin_fit(trainer, val_dataloader, loop.eval_steps)

    @override
    def on_validate_end(self, trainer: Trainer, model: Module, loop: Any) -> None:
        if self._record is not None:
            self._record.end_validation(trainer)

    @override
    def on_train_start(
        self, trainer: Trainer, model: Module, train_dataloader: Loader, loop: Any, loop_idx: int
    ) -> None:
        if self._record is not None:
            self._record.begin_training(trainer, loop.grad_accum_steps)

    @override
    def on_train_end(self, trainer: Trainer, model: Module, loop: Any, loop_idx: int) -> None:
        if self._record is not None:
            self._record.note("train_end", trainer.global_step)

    @override
    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        if self._record is not None:
            self._record.note("epoch", trainer.global_step, epoch=epoch + 1)

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if self._record is not None and not trainer.checkpoint.is_in_memory:
            self._record.begin_saving(trainer.global_step)

    @override
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        if self._record is not None:
            self._record.end_saving(trainer, ckpt_path)


def _kept(path: Path, loaded: LoadedCheckpoint) -> tuple[list[bytes], list[bytes]]:
    """Return the lines after a checkpoint's mark that a resumed run does not repeat.

    Results of tests, and what was written since the checkpoint was loaded.
    """
    assert loaded.place is not None  # it has the mark
    end = loaded.place.get("num_bytes") or 0
    start = None if loaded.since is None else max(loaded.since, end)
    tests = [] if loaded.repeats_tests else lines_from(path, end, loaded.step, start)
    own = [] if start is None else lines_from(path, start, loaded.step)
    return [line for line in tests if is_test(_result_in(line)[1])], own


def _result_in(line: bytes) -> tuple[int, dict[str, str]]:
    """Return the step and the metrics of a line; none if it is invalid."""
    try:
        record = json.loads(line)
    except ValueError:
        return -1, {}
    if not isinstance(record, dict):
        return -1, {}
    metrics = {name: str(value) for name, value in record.items() if name not in _OWN_KEYS}
    return record.get("step", -1), metrics


def to_lines(lines: list[Line]) -> str:
    """Convert metrics to lines of JSON; metrics named "step" or "time" get an underscore."""
    records = [_record(*line) for line in lines]
    with suppress(TypeError, ValueError):  # a value that `_to_line` converts
        text = _encode(records)  # together: a call of the encoder costs as much as a line
        if text.count(_BETWEEN) == len(records) - 1:  # none within a record
            return text[1:-1].replace(_BETWEEN, "}\n{") + "\n"
    return "".join(map(_to_line, records))


def _record(metrics: Metrics, step: int, now: float) -> dict[str, Any]:
    if "step" in metrics or "time" in metrics:
        metrics = {f"{k}_" if k in _OWN_KEYS else k: v for k, v in metrics.items()}
    return {"step": step, "time": now, **metrics}


def _to_line(record: dict[str, Any]) -> str:
    try:
        return _encode(record) + "\n"
    except (TypeError, ValueError):
        plain = {str(name): to_plain(value) for name, value in record.items()}
        return _encode({k: v for k, v in plain.items() if v is not _SKIPPED}) + "\n"


def to_plain(value: Any) -> Any:
    """Convert a value for JSON; `_SKIPPED` if it cannot be written."""
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
