"""Metrics for TensorBoard."""

from __future__ import annotations

import logging
import time
import warnings
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.callback import Metrics, StateDict
from modelzoo_trainer.core.parts.results_log import scopes_of
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.logger import Logger
from modelzoo_trainer.loggers.event_files import Ends, Value, are_at, cut, ends_of, event_files

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.tensorboard")


class _Loaded(NamedTuple):
    """A checkpoint that a fit may resume from."""

    step: int
    marked: Ends | None
    """The lengths of the event files when it was written; None = not known."""
    since: Ends | None
    """Those when it, or one before it, was loaded."""
    keeps_tests: bool
    """Whether a fit logs no metrics that are named like metrics of `trainer.test`."""


class TensorBoardLogger(Logger):
    """Log numbers as scalars, strings as text, and tensors with dimensions as histograms.

    A resumed run removes the events that were written after the checkpoint and hides the steps that
    it will repeat; results of `trainer.test`, and validations since the checkpoint was loaded, are
    kept. A run that starts at step 0 moves the event files of earlier runs to a folder
    `earlier-<time>`, where TensorBoard shows them as another run. If the folder cannot be written,
    a warning is logged once, and the run continues.

    Args:
        summary_dir: The folder of event files; None = `events` in `model_dir`.
        legacy_event_dirs: Write to `train` and `eval` in `model_dir` instead, with validation
            metrics without their prefix.

    State: The lengths of the event files.

    Raises:
        ConfigError: At set-up, if tensorboard is not installed, or both arguments are given.
    """

    def __init__(self, summary_dir: Path | None = None, legacy_event_dirs: bool = False) -> None:
        if summary_dir is not None and legacy_event_dirs:
            raise ConfigError(
                f"TensorBoardLogger: set either summary_dir or legacy_event_dirs, not both; got "
                f"summary_dir={str(summary_dir)!r}."
            )
        self._given = None if summary_dir is None else Path(summary_dir)
        self._is_legacy = legacy_event_dirs
        self._folders = ("train", "eval") if legacy_event_dirs else ("",)
        self._root = Path()
        self._make: Any = None
        self._summary: Any = None
        self._writers: dict[str, Any] = {}
        self._purge_step: int | None = None
        self._marked: Ends | None = None
        self._loaded: _Loaded | None = None
        self._kept_tests: list[Value] = []
        """Results of tests that were kept when the run resumed."""
        self._others: list[Path] | None = None
        self._has_failed = False

    @override
    def setup(self, trainer: Trainer) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of its own imports
                from tensorboard.compat.proto.summary_pb2 import Summary
                from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "TensorBoardLogger requires tensorboard, which is not installed: "
                "pip install 'modelzoo-trainer[tensorboard]'"
            ) from None
        self._make, self._summary = SummaryWriter, Summary
        default = trainer.model_dir if self._is_legacy else trainer.model_dir / "events"
        self._root = self._given or default

    @override
    def log_metrics(self, metrics: Metrics, step: int) -> None:
        if self._has_failed:
            return
        try:
            scalars: dict[str, list[tuple[str, float]]] = {}
            for name, value in metrics.items():
                folder, tag = self._place(name)
                if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
                    if self._kept_tests and self._repeats_test(step, tag, float(value)):
                        continue
                    scalars.setdefault(folder, []).append((tag, float(value)))
                else:
                    self._write(self._writer(folder), tag, value, step)
            for folder, pairs in scalars.items():
                # One event, since each one wakes the writer thread, for which training waits.
                values = [{"tag": tag, "simple_value": value} for tag, value in pairs]
                writer = self._writer(folder)
                writer.file_writer.add_summary(self._summary(value=values), step)
        except OSError as error:
            self._fail(error)

    def _place(self, name: str) -> tuple[str, str]:
        """Return the folder of a metric, and its name there."""
        folder = ""
        if self._is_legacy:
            is_val = name.startswith("validate_")
            folder = "eval" if is_val else "train"
            name = name.partition("/")[2] if is_val else name
        return folder, name

    def _repeats_test(self, step: int, tag: str, value: float) -> bool:
        """Return whether it is a kept result, which a callback of the resumed fit repeats."""
        found = (step, tag, float(np.float32(value)))
        is_kept = found in self._kept_tests
        if is_kept:
            self._kept_tests.remove(found)
        return is_kept

    def _writer(self, folder: str) -> Any:
        if folder not in self._writers:
            self._others = self._earlier()
            path = self._root / folder
            self._writers[folder] = self._make(str(path), purge_step=self._purge_step)
        return self._writers[folder]

    def _write(self, writer: Any, name: str, value: Any, step: int) -> None:
        if isinstance(value, str):
            writer.add_text(name, value, step)
        elif isinstance(value, Tensor) and value.numel() and value.isfinite().all():
            writer.add_histogram(name, value.float(), step)
        else:
            log.debug(
                "Metric %s was not written: type %s is not supported (or not finite). Log a "
                "number, a string or a tensor.",
                name,
                type(value).__name__,
            )

    @override
    def flush(self) -> None:
        self._each("flush")

    @override
    def finalize(self) -> None:
        self._each("close")
        self._writers = {}

    def _each(self, method: str) -> None:
        try:
            for writer in self._writers.values():
                getattr(writer, method)()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            log.warning("Cannot write %s, so metrics are lost: %s", self._root, error)
        self._has_failed = True

    # ---- resuming

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        if trainer.is_resuming and ckpt_path is None:
            self._go_back(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Flush, and return the lengths of the event files."""
        self.flush()
        return {"files": self._ends()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the lengths of the event files at the checkpoint."""
        self._marked = state["files"]

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        marked, self._marked = self._marked, None
        if "global_step" in state_dict:
            since = self.state_dict()["files"] if self._loaded is None else self._loaded.since
            keeps_tests = "test" not in scopes_of(trainer)
            self._loaded = _Loaded(trainer.global_step, marked, since, keeps_tests)
        if trainer.is_resuming:  # a validation of a checkpoint removes nothing
            self._go_back(trainer)

    def _go_back(self, trainer: Trainer) -> None:
        """Remove and hide repeated events, or move event files of earlier runs."""
        loaded, self._loaded = self._loaded, None
        try:
            if loaded is not None and loaded.step == trainer.global_step:
                self.finalize()  # the next writer starts after the checkpoint's step
                self._purge_step = loaded.step + 1
                if trainer.backend.comm.is_main:
                    self._cut(loaded)
            elif trainer.global_step == 0 and trainer.backend.comm.is_main:
                self._put_aside()
        except OSError as error:
            self._fail(error)

    def _cut(self, loaded: _Loaded) -> None:
        """Remove events between a checkpoint and its loading: those at its step are repeated.

        TensorBoard hides only values of later steps.
        """
        marked, since = loaded.marked, loaded.since
        if marked is None or since is None or not are_at(since, marked):
            return
        last_test = loaded.step if loaded.keeps_tests else -1
        kept: list[Value] = []
        for name, stop in since.items():
            if stop > (start := marked.get(name, 0)):
                kept += cut(self._root / name, start, stop, last_test)
        self._kept_tests = kept

    def _ends(self) -> Ends | None:
        """Return the lengths of the event files; None = not known."""
        try:
            return ends_of(self._root, event_files(self._root, self._folders))
        except OSError:
            return None

    def _earlier(self) -> list[Path]:
        """Return the event files that existed before this logger wrote any."""
        if self._others is not None:
            return self._others
        return event_files(self._root, self._folders)

    def _put_aside(self) -> None:
        """Move the event files of earlier runs to a separate folder."""
        name = f"earlier-{time.strftime('%Y%m%d-%H%M%S')}"
        others, self._others = self._earlier(), []
        for path in others:
            folder = path.parent / name
            folder.mkdir(exist_ok=True)
            path.rename(folder / path.name)
        if others:
            log.warning(
                "New run (step 0): moved the event files of earlier runs (%d) to %s.",
                len(others),
                others[0].parent / name,
            )
